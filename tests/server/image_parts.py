"""What tests of image generation share: requests, pictures as Pillow sees them, and the events of a raw stream."""

from __future__ import annotations

import base64
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from PIL import Image
from serving import Server

if TYPE_CHECKING:
    import httpx2

GENERATE = "/v1/images/generations"
IMAGE_MODEL = "service-image"
# 256 pixels: small and quick.
SMALL: dict[str, Any] = {"model": IMAGE_MODEL, "prompt": "a red circle", "size": "256x256", "seed": 7}


async def generate(http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The whole answer to a small request with these fields."""
    response = await http.post(GENERATE, json=SMALL | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def picture(item: dict[str, Any]) -> Image.Image:
    """The picture in `b64_json`."""
    return opened(base64.b64decode(item["b64_json"], validate=True))


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def path_of(url: str) -> str:
    """A link's path and query."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


def stored(server: Server) -> set[str]:
    """The names of the image files that the server has."""
    folder: Path = server.data_dir / "images"
    return {file.name for file in folder.iterdir()}


def fill_up(ballast: Path) -> Path:
    """Write into this file until its disk has no byte left."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(ballast.parent).f_bavail == 0
    return ballast


def image_events(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream: each with its name in its own line, comments left out."""
    assert data.endswith(b"\n\n")
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        if block == ": keep-alive":
            continue
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
