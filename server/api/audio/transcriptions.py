"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a recording, as text or subtitles."""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, model_validator

from engine import Segment, TranscriptionRequest, language_code
from server.api.caller import AudioCaller, Caller, checked, event, json_response, of_app
from server.api.schema import ModelBody, described_form
from server.api.uploads import Upload, disk_full, read_upload
from server.batches.folder import NO_SPACE, Folder
from server.errors import ApiError
from server.http.disconnect import until_disconnect
from server.validation import FieldError

router = APIRouter(prefix="/v1/audio", tags=["audio"])
TheFolder = Annotated[Folder, Depends(of_app("recordings"))]
_GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
_FILE = "WAV, FLAC, OGG, MP3, M4A or WebM."
_SEGMENTS = {_GRANULARITIES[0]: {"type": "array", "items": {"type": "string", "enum": ["segment"]}}}


def _language(value: Any) -> Any:
    code = language_code(value)
    if code is None:
        raise ValueError("must be a code of a language, like en")
    return code


class TranslationBody(ModelBody):
    """The fields of `POST /v1/audio/translations` beside its file."""

    prompt: Annotated[str, Field(max_length=4096)] | None = None
    """What may have been said before, for names and spelling. The model reads the end of it."""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    """Default json. srt and vtt are subtitles; verbose_json has segments with their times."""
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Default 0: the likeliest words."""
    stream: bool | None = None
    """Send the text while it is heard, as events. With json or text only."""

    @model_validator(mode="after")
    def _can_be_streamed(self) -> TranslationBody:
        if self.stream and self.response_format not in {None, "json", "text"}:
            raise FieldError("stream", "needs `response_format` `json` or `text`: the others cannot be streamed")
        return self


class TranscriptionBody(TranslationBody):
    """The fields of `POST /v1/audio/transcriptions` beside its file."""

    language: Annotated[str, BeforeValidator(_language)] | None = None
    """The language that is spoken, like `en`. Default: detected in the first half minute."""


@router.post(
    "/transcriptions",
    response_class=Response,
    openapi_extra=described_form(TranscriptionBody, file=_FILE, more=_SEGMENTS),
)
async def transcribe(caller: AudioCaller, folder: TheFolder) -> Response:
    """Write down what is said in a recording, in its own language."""
    return await _answered(caller, folder, TranscriptionBody)


@router.post("/translations", response_class=Response, openapi_extra=described_form(TranslationBody, file=_FILE))
async def translate(caller: AudioCaller, folder: TheFolder) -> Response:
    """Write down in English what is said in a recording."""
    return await _answered(caller, folder, TranslationBody)


async def _answered(caller: Caller, folder: Folder, kind: type[TranslationBody]) -> Response:
    most, setting = caller.settings.max_recording_bytes, "HEARTH_MAX_RECORDING_BYTES"
    with caller.engine.running():
        upload = await read_upload(caller.request, folder, most_bytes=most, left_bytes=most, setting=setting)
    try:
        body = _checked(kind, upload)
        asked = TranscriptionRequest(
            request_id=secrets.token_hex(12),
            model=caller.access.model_id(caller.key, body.model),
            path=await folder.run(upload.writer.close_now),
            language=body.language if isinstance(body, TranscriptionBody) else None,
            translate=not isinstance(body, TranscriptionBody),
            prompt=body.prompt or "",
            temperature=body.temperature or 0.0,
        )
        caller.record.model, caller.record.stream = asked.model, bool(body.stream)
        heard = Transcript(caller, asked, upload, folder)
        if body.stream:
            return caller.streamed(heard.events())
    except BaseException as error:
        await folder.run(upload.writer.discard_now)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise disk_full() from error
        raise
    await until_disconnect(heard.whole(), caller.request)
    return _FORMATS[body.response_format or "json"](heard)


def _checked(kind: type[TranslationBody], upload: Upload) -> TranslationBody:
    for name in _GRANULARITIES:
        if not {"segment"}.issuperset(upload.fields.get(name, ())):
            sentence = "`timestamp_granularities` must be `segment`: words have no times here."
            raise ApiError(400, "invalid_value", sentence, param="timestamp_granularities")
    return checked(kind, upload.last, form=True)


class Transcript:
    """What has been heard of one recording. Its file is deleted when it has been, or is given up."""

    def __init__(self, caller: Caller, asked: TranscriptionRequest, upload: Upload, folder: Folder) -> None:
        self.asked = asked
        self.segments: list[Segment] = []
        self.seconds = 0.0
        self._caller, self._upload, self._folder = caller, upload, folder

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    async def whole(self) -> None:
        async for _ in self._heard():
            pass

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text as it is heard. Closing it aborts what is not heard."""
        begun = False
        async for segment in self._heard():
            delta = segment.text if begun else segment.text.lstrip()
            begun = True
            yield event("transcript.text.delta", delta=delta)
        tokens = sum(len(segment.tokens) for segment in self.segments)
        counts = {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}  # strict clients insist on them
        usage = {"type": "tokens", **counts, "seconds": round(self.seconds, 2)}
        yield event("transcript.text.done", text=self.text, usage=usage)

    async def _heard(self) -> AsyncGenerator[Segment, None]:
        try:
            async with await self._caller.engine.transcribe(self.asked) as stream:
                async for segment in stream:
                    self.segments.append(segment)
                    yield segment
            self.seconds = stream.seconds
        finally:
            await self._folder.run(self._upload.writer.discard_now)


def _usage(heard: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(heard.seconds, 2)}


def _verbose(heard: Transcript) -> Response:
    spoken = next((segment.language for segment in heard.segments), heard.asked.language or "")
    return json_response(
        {
            "task": "translate" if heard.asked.translate else "transcribe",
            "language": "en" if heard.asked.translate else spoken,
            "duration": round(heard.seconds, 2),
            "text": heard.text,
            "segments": [_shown(number, segment, heard.asked) for number, segment in enumerate(heard.segments)],
            "usage": _usage(heard),
        }
    )


def _shown(number: int, segment: Segment, asked: TranscriptionRequest) -> dict[str, Any]:
    text = segment.text.encode()
    return {
        "id": number,
        "seek": round(segment.start * 100),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": asked.temperature,
        "avg_logprob": round(segment.logprob, 4),
        "compression_ratio": round(len(text) / len(zlib.compress(text)), 3),
        "no_speech_prob": 0.0,  # silence does not reach the model
    }


def _srt(heard: Transcript) -> Response:
    cues = "\n".join(f"{number}\n{cue}" for number, cue in enumerate(_cues(heard, ","), 1))
    return Response(cues, media_type="application/x-subrip; charset=utf-8")


def _vtt(heard: Transcript) -> Response:
    return Response("\n".join(["WEBVTT\n", *_cues(heard, ".")]), media_type="text/vtt; charset=utf-8")


def _cues(heard: Transcript, mark: str) -> list[str]:
    """Return the segments with their times. No text in them can be read as the times of another segment."""
    lines = [" ".join(segment.text.split()).replace("-->", "->") for segment in heard.segments]
    times = [f"{_clock(segment.start, mark)} --> {_clock(segment.end, mark)}" for segment in heard.segments]
    return [f"{time}\n{line}\n" for time, line in zip(times, lines, strict=True)]


def _clock(seconds: float, mark: str) -> str:
    whole = math.floor(seconds * 1000 + 0.5)
    minutes, milliseconds = divmod(whole, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


_FORMATS: dict[str, Callable[[Transcript], Response]] = {
    "json": lambda heard: json_response({"text": heard.text, "usage": _usage(heard)}),
    "text": lambda heard: Response(heard.text + "\n", media_type="text/plain; charset=utf-8"),
    "srt": _srt,
    "vtt": _vtt,
    "verbose_json": _verbose,
}
