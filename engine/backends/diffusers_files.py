"""A finished picture as a file: of exactly the size asked for, marked as made by a model, never with the prompt."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, PngImagePlugin

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.images.types import ImageFormat

_JPEG_QUALITY = 92
_WEBP_QUALITY = 90
# Four times faster than Pillow's default, and 17 % larger (measured at 1024 x 1024).
_PNG_LEVEL = 1
# https://www.iptc.org/std/photometadata/specification/ : Digital Source Type
_XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about="" '
    'xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" Iptc4xmpExt:DigitalSourceType='
    '"http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"/></rdf:RDF></x:xmpmeta>'
    '<?xpacket end="w"?>'
)


def encode(pixels: NDArray[Any], *, size: int, output_format: ImageFormat, quality: int | None, mark: bool) -> bytes:
    """Return a file of `size` by `size` pixels of a picture (height, width, 3) with values from 0 to 1.

    `quality` is 0 to 100 for JPEG and WebP, None for ours; a PNG loses nothing at any. `mark`: metadata say that
    a model made it.
    """
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    if picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    if output_format == "png":
        info = PngImagePlugin.PngInfo()
        if mark:
            info.add_itxt("XML:com.adobe.xmp", _XMP)
        picture.save(out, "PNG", compress_level=_PNG_LEVEL, pnginfo=info)
    else:
        metadata = {"xmp": _XMP.encode()} if mark else {}
        ours = _JPEG_QUALITY if output_format == "jpeg" else _WEBP_QUALITY
        picture.save(out, output_format.upper(), quality=ours if quality is None else quality, **metadata)
    return out.getvalue()
