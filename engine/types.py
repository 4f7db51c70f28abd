"""What crosses the border between the engine and its callers: plain frozen data, no behaviour."""

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

# What a load does, for people, and how far it is, from 0 to 1
Report: TypeAlias = Callable[[str, float], None]

ImageFormat = Literal["png", "jpeg", "webp"]
Quality = Literal["standard", "hd"]
InputType = Literal["query", "document"]

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
ModelStatus = Literal["unloaded", "loading", "ready", "sleeping", "failed"]
# The next request has it loaded or woken.
AWAITS_TURN: frozenset[ModelStatus] = frozenset({"unloaded", "sleeping"})
ANSWERS: frozenset[ModelStatus] = AWAITS_TURN | {"ready"}
# Ready, or not going to be without a request or a reload.
SETTLED: frozenset[ModelStatus] = ANSWERS | {"failed"}
# own: the folder that models.yaml names. variant: what the plan chose. shipped: the voices that come with Hearth and
# speak real words. demo: what comes with Hearth to try it out.
WeightsSource = Literal["own", "variant", "shipped", "demo"]


class Urgency(IntEnum):
    """The lower goes first."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The common fields of requests that are queued by urgency, already checked field by field.

    `request_id` is ours, never the client's. `owner` is the sender, an opaque name, and `queue_share` their weight: the
    queue is fair between owners, by `urgency` first.
    """

    request_id: str
    model: str
    owner: str = ""
    urgency: Urgency = Urgency.INTERACTIVE
    queue_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Request):
    """The common fields of `ChatRequest` and `TextRequest`.

    `max_tokens` is for each answer; None means as many as the model allows. A sampling field that is None takes the
    value of the model's generation_config.json. `cache_salt` separates prefix caches: requests share cached prompts
    only with requests of the same salt. `before_turn` is awaited with the tokens of the prompt and the most that all
    answers may have, before the request is queued; what it raises refuses the request. `structured_outputs` has one
    constraint by its name, in the shape of vLLM's field of that name. `adapter` is set by the engine if `model` names
    an adapter: `model` is then its base.
    """

    adapter: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    cache_salt: str | None = None
    ignore_eos: bool = False
    structured_outputs: Mapping[str, Any] | None = None
    before_turn: Callable[[int, int], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    """One conversation to answer.

    `messages`, `tools`, `tool_choice` and `response_format` are in the shape of the OpenAI convention. With `whole`
    only the last step is wanted, with all of the text. With `continue_answer` the last message, an assistant's, is the
    beginning of the answer, which has only what follows it. Without `generation_prompt` the template's opening of an
    answer is left out. `image_paths` name the parts of its images in errors, in their order; if empty, their places in
    `messages` do.
    """

    messages: list[dict[str, Any]]
    image_paths: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_answer: bool = False
    generation_prompt: bool = True
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(GenerationRequest):
    """Texts to continue, without a chat template.

    Each prompt is text, or token ids of this very model. Answer `i` to prompt `p` has the index `p * n + i`.
    `top_logprobs` None means no probabilities; `prompt_logprobs` is the same for the prompt's tokens. With `echo` an
    answer comes with its prompt; `max_tokens` may then be 0.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False


# Classes that are made for every token are structs: a frozen dataclass takes ten times as long to make.
class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts so far. `cached_tokens` are part of `prompt_tokens`; None where not known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. `id` and `name` come once, with the first piece of call `index`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural-log probability; `top` has the likeliest at its place, whose own `top` is empty."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt. `logprob` is None for the first token, and if it was not requested.

    `top` holds (token id, token, natural-log probability, rank) of the likeliest at its place, and of itself.
    """

    id: int
    token: str
    logprob: float | None = None
    top: tuple[tuple[int, str, float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it comes with its answer; `tokens` are empty if no probabilities were requested."""

    text: str
    tokens: tuple[PromptToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a prompt, as ids and as the tokenizer writes them."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    context_length: int


class ChatDelta(msgspec.Struct, gc=False):
    """What one engine step added to choice `index`. The last delta of a choice has a `finish_reason`.

    `stop_text` is the stop sequence that ended the choice, if one did. `prompt` comes with the first delta, if it was
    asked for.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    prompt: Prompt | None = None

    def calls(self) -> tuple[tuple[ToolCallDelta, ...], tuple[ToolCallDelta, ...]]:
        """Return the pieces that continue an earlier delta's call, which come before `content`, and all others."""
        going_on = tuple(takewhile(lambda piece: piece.id is None, self.tool_calls))
        return going_on, self.tool_calls[len(going_on) :]


class ChatStep(msgspec.Struct, gc=False):
    """All that one engine step added to one request, with the usage so far."""

    deltas: tuple[ChatDelta, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One complete answer. `stop_text` is the stop sequence that ended it, if one did; `prompt` only if asked for."""

    index: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_text: str | None = None
    prompt: Prompt | None = None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """All answers to one request, in the order of their index."""

    choices: tuple[ChatChoice, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its users see it.

    `context_length` is None until a chat model has been loaded once, `max_input_tokens` and `dimensions` until a model
    for embeddings or reranking has. `sizes` are those of images, None if it makes none. `running` counts sequences,
    images or texts in progress, `waiting` requests in the queue. `parent` is the base of an adapter.
    """

    id: str
    tier: str
    owned_by: str
    description: str
    capabilities: tuple[str, ...]
    status: ModelStatus
    demo: bool
    created: int
    context_length: int | None = None
    max_output_tokens: int | None = None
    sizes: tuple[str, ...] | None = None
    running: int = 0
    waiting: int = 0
    dimensions: int | None = None
    max_input_tokens: int | None = None
    parent: str | None = None

    @property
    def max_model_len(self) -> int | None:
        return self.context_length


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """What a model is doing right now. `phase` is for people; `progress` runs from 0 to 1.

    `remaining_seconds` is how long a load should still take, going by the last one; None if that is not known.
    `error` says why the model is not ready, for the operator: it may name files. `reason` is public: what is wrong with
    a failed model. `restarts` counts deaths since the start, `waiting` the requests that wait for a model
    that takes turns to be loaded. `engines` has those of a model with replicas.
    """

    id: str
    status: ModelStatus
    phase: str
    progress: float
    elapsed_seconds: float
    restarts: int
    error: str | None
    reason: str | None = None
    waiting: int = 0
    remaining_seconds: float | None = None
    engines: tuple["ModelHealth", ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What a model was loaded with.

    `folder` is below the weights directory, or the demo's name; of voices that come with Hearth it is empty.
    `planned_bytes` is what the plan gives it on each GPU (key: the index) and in RAM (key: None); empty if its size
    is unknown.
    """

    source: WeightsSource
    folder: str
    planned_bytes: Mapping[int | None, int]


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """How busy a loaded model is: sequences (or images, or texts to speak) that run, requests that wait for a turn.

    `pids` are its processes, without those that they have started. `later_bytes` is what its next load takes on each
    device, if that differs from what it was loaded with. `compiled` is None if its kind is never compiled.
    `kv_cache_usage` is the used share of the KV cache, 0 to 1; None if there is none, or vLLM does not count.
    `engines` has the loaded ones of a model with replicas.
    """

    id: str
    running: int
    waiting: int
    pids: tuple[int, ...] = ()
    served: Served | None = None
    later_bytes: Mapping[int | None, int] | None = None
    compiled: bool | None = None
    kv_cache_usage: float | None = None
    engines: tuple["ModelLoad", ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRequest:
    """What images are made of beside their prompt: files as they were sent, and their names in errors.

    Transparent parts of `mask`, which is as large as the only picture, are those that change; None: all of it may.
    `strength`: how much changes, above 0 up to 1, where the image starts from a picture; None: the model's own.
    """

    pictures: tuple[bytes, ...]
    names: tuple[str, ...]
    mask: bytes | None = None
    strength: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """`n` images of one prompt, already checked field by field.

    `size` is the edge of the square in pixels. Image `i` is made with `seed + i`, modulo 2**63; None: random.
    With an `edit` they are made of pictures too.
    `compression` is the quality of a JPEG or WebP, 0 to 100. `partial_images`: previews of each image on the way.
    `owner` and `queue_share` as in `Request`; `before_turn` is awaited with `n` once, before anything
    waits for a turn, and what it raises refuses the request.
    """

    request_id: str
    model: str
    prompt: str
    n: int = 1
    size: int = 1024
    quality: Quality = "standard"
    seed: int | None = None
    negative_prompt: str | None = None
    output_format: ImageFormat = "png"
    compression: int | None = None
    partial_images: int = 0
    edit: EditRequest | None = None
    owner: str = ""
    queue_share: float = 1.0
    before_turn: Callable[[int], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest(Request):
    """The common fields of `EmbeddingRequest` and `RerankRequest`.

    With `truncate` an input that is too long is cut, else it is refused. `before_turn` is awaited with the tokens of
    all inputs, before the first waits for its turn, and what it raises refuses the request.
    """

    truncate: bool = False
    before_turn: Callable[[int], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(PoolingRequest):
    """Texts, or token ids of this very model, that become vectors.

    `dimensions`: how many numbers a vector has; None: as many as the model makes. `input_type` puts the model's prefix
    for it before texts.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    dimensions: int | None = None
    input_type: InputType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(PoolingRequest):
    """A query, and the texts to score by how well they answer it."""

    query: str
    documents: tuple[str, ...]


class Pooled(msgspec.Struct, frozen=True, gc=False):
    """The result of input `index`, which has `tokens`: a vector or, of a reranker, one score (above 0: relevant)."""

    index: int
    tokens: int
    values: "array[float]"
    """In 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest(Request):
    """A sound file to transcribe in its language (ISO 639-1; None: to be detected), or to translate into English.

    `path` is read for as long as the stream lasts. `prompt` is what may have been said before: names, spelling.
    """

    path: Path
    language: str | None = None
    translate: bool = False
    prompt: str = ""
    temperature: float = 0.0


class Segment(msgspec.Struct, frozen=True):
    """What was said from `start` to `end`, in seconds of the file. Texts of segments put together are the whole text.

    `logprob` is the mean of the natural logarithms of its tokens' probabilities.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    logprob: float
    language: str


class Picture(msgspec.Struct, frozen=True):
    """Pixels, row by row: three bytes each, or one where it is a mask."""

    width: int
    height: int
    data: bytes


class Edit(msgspec.Struct, frozen=True):
    """What one image is made of beside its prompt, as the worker gets it.

    Without a `strength` the model only looks at the pictures; else the image begins with the first, which is as large
    as it is rendered. `mask` is 255 where the image may change; `kept` is the picture in the size of the file, and
    `kept_mask` the mask in that size: the file has the picture's own pixels where that is 0.
    """

    pictures: tuple[Picture, ...]
    strength: float | None = None
    mask: Picture | None = None
    kept: Picture | None = None
    kept_mask: Picture | None = None


class ImageJob(msgspec.Struct, frozen=True):
    """One image as the worker gets it, number `index` of its request, with the fields that decide what it is.

    `size` is the edge of the file; the profile says at which size it is rendered. A step takes the memory of `weight`
    images of its size.
    """

    prompt: str
    size: int
    quality: Quality
    seed: int
    negative_prompt: str | None = None
    output_format: ImageFormat = "png"
    compression: int | None = None
    partial_images: int = 0
    index: int = 0
    edit: Edit | None = None
    weight: int = 1


class ImageProgress(msgspec.Struct, frozen=True, tag=True):
    """Image `index` has finished `step` of `steps`."""

    index: int
    step: int
    steps: int


class PartialImage(msgspec.Struct, frozen=True, tag=True):
    """Preview number `number` (from 0) of image `index`: a whole file in the format asked for."""

    index: int
    number: int
    data: bytes


class FinishedImage(msgspec.Struct, frozen=True, tag=True):
    """Image `index`: a whole file in the format asked for, of exactly the size asked for."""

    index: int
    data: bytes
    seed: int
    steps: int


ImageEvent: TypeAlias = ImageProgress | PartialImage | FinishedImage
