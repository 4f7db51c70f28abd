"""`POST /v1/images/edits` and `/v1/images/variations`: images that are made of pictures, sent as a form."""

from __future__ import annotations

from typing import Annotated, Self

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, model_validator

from engine import EditRequest
from server.api.caller import ImageCaller, checked
from server.api.images.answer import ImageBody, answered
from server.api.schema import described_form
from server.errors import ApiError
from server.http.forms import LONGEST_NAME, Form, FormRoute
from server.validation import FieldError

router = APIRouter(prefix="/v1", tags=["images"], route_class=FormRoute)
_PICTURES = ("image", "image[]")
_PICTURE = "PNG, JPEG or WebP. Several, where the model takes them, as `image[]`."
_MASK = "As large as the picture, and transparent where it may change."
_MOST_PICTURES = 16
_LONGEST_FIELD_BYTES = 16 * 2**10


class ImageVariationBody(ImageBody):
    """The fields of `POST /v1/images/variations` beside its picture."""

    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """How much of the picture changes. Default 0.7, within a mask 1."""
    include_progress: Annotated[bool | None, Field(alias="stream_options[include_progress]")] = None
    """With `stream: true`: adds an event `image_edit.progress` for each step, which strict clients do not know."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.include_progress is not None and not self.stream:
            raise FieldError("stream_options", "needs `stream: true`")
        return self


class ImageEditBody(ImageVariationBody):
    """The fields of `POST /v1/images/edits` beside its pictures."""

    prompt: Annotated[str, Field(min_length=1, max_length=1000)]
    """What the image shows when it is done."""
    negative_prompt: Annotated[str, Field(max_length=1000)] | None = None
    """What the image does not show, for models that know how."""


@router.post(
    "/images/edits", response_class=Response, openapi_extra=described_form(ImageEditBody, image=_PICTURE, mask=_MASK)
)
async def edit_images(caller: ImageCaller) -> Response:
    """Make images of pictures and a text: changed as it says, as a whole or within a mask."""
    form: Form = caller.request.state.form
    body = checked(ImageEditBody, _fields(form), form=True)
    edit = _edit(form, body.strength, mask=_mask(form))
    asked = body.to_request(caller, prompt=body.prompt, negative_prompt=body.negative_prompt or None, edit=edit)
    return await answered(caller, body, asked, events="image_edit", progress=bool(body.include_progress))


@router.post(
    "/images/variations", response_class=Response, openapi_extra=described_form(ImageVariationBody, image=_PICTURE)
)
async def vary_image(caller: ImageCaller) -> Response:
    """Make images that are like a picture."""
    form: Form = caller.request.state.form
    body = checked(ImageVariationBody, _fields(form), form=True)
    asked = body.to_request(caller, edit=_edit(form, body.strength or 0.7))
    return await answered(caller, body, asked, events="image_edit", progress=bool(body.include_progress))


def _edit(form: Form, strength: float | None, *, mask: bytes | None = None) -> EditRequest:
    pictures = tuple(data for name, data in form if name in _PICTURES)
    if not pictures:
        raise ApiError(400, "missing_field", "`image` is missing.", param="image")
    if len(pictures) > _MOST_PICTURES:
        raise ApiError(400, "invalid_value", f"`image` must be at most {_MOST_PICTURES} pictures.", param="image")
    names = ("image",) if len(pictures) == 1 else tuple(f"image[{index}]" for index in range(len(pictures)))
    return EditRequest(pictures=pictures, names=names, mask=mask, strength=strength)


def _mask(form: Form) -> bytes | None:
    masks = [data for name, data in form if name == "mask"]
    if len(masks) > 1:
        raise ApiError(400, "invalid_value", "`mask` must be one picture.", param="mask")
    return masks[0] if masks else None


def _fields(form: Form) -> dict[str, str]:
    fields = {}
    for name, data in form:
        if name in {*_PICTURES, "mask"}:
            continue
        try:
            if len(data) > _LONGEST_FIELD_BYTES:
                raise ApiError(400, "invalid_value", "A field of the form is too long.", param=name[:LONGEST_NAME])
            fields[name] = data.decode()
        except UnicodeDecodeError:
            sentence = "A field of the form is not UTF-8."
            raise ApiError(400, "invalid_value", sentence, param=name[:LONGEST_NAME]) from None
    return fields
