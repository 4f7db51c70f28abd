"""999 characters of prompt in Latin and Ethiopic script, on a tiny pipeline of each shipped profile's family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_studio import Studio, apart

from engine.backends.diffusers.families import FAMILIES, adapter_for
from engine.backends.diffusers.service import load
from engine.config.models import profile_named, shipped
from engine.errors import RequestError
from engine.types import ImageJob

PROFILES = {
    "sdxl": "sdxl",
    "flux2-klein-4b": "flux2_klein",
    "z-image-turbo": "z_image",
    "qwen-image-2512": "qwen_image",
}
LATIN = ("a red cube on a wooden table beside a window with rain " * 19)[:999]
AMHARIC = ("ቀይ ሳጥን በጠረጴዛ ላይ በመስኮት አጠገብ ዝናብ ሲዘንብ " * 28)[:999]
SHORT = "a red cube"


def studio(folder: Path, profile: str, batching: str = "steps") -> Studio:
    """With what the shipped profile says of prompts and guidance; what is offloaded on a GPU is run by requests."""
    found = profile_named(profile)
    steps = {"standard": 2, "hd": 2}
    changes: dict[str, Any] = {"steps": steps, "guidance_scale": found.guidance_scale, "batching": batching}
    return Studio(folder, changes | {"max_prompt_tokens": found.max_prompt_tokens})


def test_every_shipped_profile_is_tried_here():
    assert {*PROFILES, "demo"} == set(shipped())


@pytest.mark.parametrize(
    "text",
    [pytest.param(LATIN, marks=pytest.mark.rounds), AMHARIC],  # the longer of the two in every run
    ids=["latin", "amharic"],
)
@pytest.mark.parametrize("profile", PROFILES)
def test_999_characters_are_read_to_the_end(profile: str, text: str, folders: Callable[[str], Path]):
    made = studio(folders(PROFILES[profile]), profile)
    made.submit(1, text)
    made.submit(2, SHORT)  # joins what is made of the long one
    made.submit(3, text[:-12] + text[:12])
    made.run()
    assert apart(made.file(1), made.file(3)) > 0
    alone = studio(folders(PROFILES[profile]), profile)
    alone.submit(2, SHORT)
    alone.run()
    assert apart(alone.file(2), made.file(2)) <= 1


@pytest.mark.rounds
@pytest.mark.parametrize("profile", ["flux2-klein-4b", "z-image-turbo"])
def test_whole_requests_read_as_much(profile: str, folders: Callable[[str], Path]):
    by_steps, whole = (studio(folders(PROFILES[profile]), profile, batching) for batching in ("steps", "requests"))
    for made in (by_steps, whole):
        made.submit(1, AMHARIC)
        made.run()
    assert apart(by_steps.file(1), whole.file(1)) <= 1


@torch.inference_mode()
@pytest.mark.parametrize("family", ["flux2_klein", "z_image", "qwen_image"])
def test_a_prompt_that_the_pipelines_defaults_hold_is_read_as_they_read_it(family: str, folders: Callable[[str], Path]):
    pipe = load(folders(family), profile_named("demo"))
    usual = FAMILIES[type(pipe).__name__].sequence_length
    theirs = pipe.encode_prompt([SHORT], max_sequence_length=usual)[0]
    adapter = adapter_for(pipe)
    assert adapter is not None
    ours, _ = adapter.embed(ImageJob(SHORT, 64, "standard", 1, None), guided=False)
    assert torch.equal(ours["prompt"], theirs[0] if isinstance(theirs, list) else theirs)
    assert adapter.family.length_for(pipe.tokenizer, AMHARIC) == 3072


def test_what_is_longer_is_refused_with_both_numbers(folders: Callable[[str], Path]):
    made = studio(folders("z_image"), "z-image-turbo")
    with pytest.raises(RequestError, match=r"prompt has \d+ tokens, and this model reads at most 3072"):
        made.submit(1, AMHARIC + AMHARIC)


def test_sdxl_reads_nothing_where_there_is_only_white_space_that_clip_takes_for_words(folders: Callable[[str], Path]):
    studio = Studio(folders("sdxl"), {"guidance_scale": 4.0, "negative_prompt": True})
    studio.submit(1, "\x1c" * 100, negative_prompt="\x1d" * 100)
    studio.submit(2, "", negative_prompt=" ")
    studio.run()
    assert studio.file(1) == studio.file(2)
