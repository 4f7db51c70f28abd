"""Images made step by step, in whatever company, are the pipeline's own: at most 1/255 apart in any pixel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import TCDScheduler
from golden_parts import CLOSE, OURS, Image, apart, by_steps, guidance_of, guided

from engine.backends.diffusers.denoising import seeded
from engine.backends.diffusers.families import adapter_for

FAMILIES = ("z_image", "sdxl", "sd3", "sd3_without_t5", "flux2_klein", "qwen_image")


def by_pipeline(pipe: Any, image: Image) -> np.ndarray:
    made = pipe(
        prompt=image.prompt,
        height=image.edge,
        width=image.edge,
        num_inference_steps=image.steps,
        generator=seeded(image.seed),
        output_type="np",
        **guided(pipe, image),
    )
    return made.images[0]


def check(pipe: Any, images: list[Image]) -> None:
    made = by_steps(pipe, images)
    wanted = [by_pipeline(pipe, image) for image in images]
    differences = [apart(one, other) for one, other in zip(made, wanted, strict=True)]
    exact = max(float(np.abs(one - other).max()) for one, other in zip(made, wanted, strict=True))
    print(f"\n{type(pipe).__name__}: {max(differences) * 255:.0f}/255 apart at most ({exact:.1e} before rounding)")  # noqa: T201  # the measurement
    assert max(differences) <= CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_alone_is_the_pipelines(family: str, pipeline: Callable[[str], Any]):
    check(pipeline(family), [Image(OURS, 5, 4, guidance_of(family))])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_among_strangers_that_come_and_go_is_the_pipelines(family: str, pipeline: Callable[[str], Any]):
    scale = guidance_of(family)
    images = [
        Image(OURS, 5, 6, scale),
        Image("fog", 2**63 - 1, 3, scale, joins=1),
        Image("a very long winding road through the hills in autumn", 0, 5, scale, joins=3),
    ]
    check(pipeline(family), images)


@pytest.mark.parametrize("family", FAMILIES)
def test_guided_images_with_and_without_a_negative_prompt_are_the_pipelines(
    family: str, pipeline: Callable[[str], Any]
):
    negative = None if family == "flux2_klein" else "rain and snow"
    images = [Image(OURS, 5, 4, 3.0, negative), Image("fog", 6, 3, 3.0, joins=2)]
    check(pipeline(family), images)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_of_another_size_is_the_pipelines(family: str, pipeline: Callable[[str], Any]):
    check(pipeline(family), [Image(OURS, 5, 3, guidance_of(family), edge=128)])


LATIN = "a red cube on a wooden table beside a window with rain " * 18
AMHARIC = "ቀይ ሳጥን በጠረጴዛ ላይ በመስኮት አጠገብ ዝናብ ሲዘንብ " * 28


@pytest.mark.parametrize("text", [LATIN[:999], AMHARIC[:999]], ids=["latin", "amharic"])
@torch.inference_mode()
def test_sdxl_reads_999_characters_in_parts_each_as_its_own_encoder_does(text: str, pipeline: Callable[[str], Any]):
    pipe = pipeline("sdxl")
    adapter = adapter_for(pipe)
    parts = adapter._divided(text)
    assert len(parts) > 10
    assert " ".join(parts).replace(" ", "") == text.replace(" ", ""), "nothing is lost"
    lengths = [len(pipe.tokenizer(part).input_ids) for part in parts]
    assert max(lengths) <= 77
    own = [pipe.encode_prompt(part, do_classifier_free_guidance=False) for part in parts]
    positive, negative = adapter.embed(Image(text, 1, 1, 4.0, negative="rain").job, guided=True)
    assert torch.equal(positive["prompt"], torch.cat([prompt for prompt, *_ in own], dim=1))
    assert torch.equal(positive["pooled"], own[0][2])
    assert negative["prompt"].shape == positive["prompt"].shape
    rain = pipe.encode_prompt("", negative_prompt="rain", do_classifier_free_guidance=True)[1]
    assert torch.equal(negative["prompt"][:, :77], rain)


def test_long_and_short_prompts_of_sdxl_share_a_batch_and_whole_requests_agree(pipeline: Callable[[str], Any]):
    pipe = pipeline("sdxl")
    images = [Image(LATIN[:999], 5, 3, 4.0), Image("fog", 6, 3, 4.0, joins=1), Image(LATIN[:999], 5, 3, 4.0, "rain")]
    together = by_steps(pipe, images)
    for image, made in zip(images, together, strict=True):
        assert apart(made, by_steps(pipe, [image])[0]) <= CLOSE
    assert apart(together[0], by_steps(pipe, [Image(LATIN[:500], 5, 3, 4.0)])[0]) > CLOSE, "the end of it counts"
    assert apart(together[1], by_pipeline(pipe, images[1])) <= CLOSE


def test_a_scheduler_that_adds_noise_of_its_own_is_told_as_much_as_by_the_pipeline(pipeline: Callable[[str], Any]):
    pipe = pipeline("sdxl")
    usual = pipe.scheduler
    pipe.scheduler = TCDScheduler.from_config(usual.config)
    check(pipe, [Image(OURS, 5, 6, 4.0), Image("fog", 6, 5, 4.0, joins=1)])
    pipe.scheduler = usual


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tiny_pipelines_see_what_they_are_given(family: str, pipeline: Callable[[str], Any]):
    """Otherwise the comparisons above would prove nothing."""
    pipe = pipeline(family)
    scale = max(guidance_of(family), 3.0)
    plain = by_pipeline(pipe, Image(OURS, 5, 3, scale))
    assert apart(plain, by_pipeline(pipe, Image("fog", 5, 3, scale))) > 4 * CLOSE
    assert apart(plain, by_pipeline(pipe, Image(OURS, 6, 3, scale))) > 4 * CLOSE
    assert apart(plain, by_pipeline(pipe, Image(OURS, 5, 4, scale))) > 4 * CLOSE
    assert apart(plain, by_pipeline(pipe, Image(OURS, 5, 3, scale + 2))) > 4 * CLOSE
