"""The demo image model keeps its promises, in the hands of diffusers' own pipeline; and the judge is one to be trusted.

What the image service makes of the model is tested beside the service.
"""

import random
from itertools import combinations

import numpy as np
import pytest
from demo_models.image.pictures import COLOURS, Circle, Scene, draw, random_circle
from demo_models.promised import FixedImage, fixed_images
from demo_models.vision import pictures as shown
from manifest_parts import problems
from PIL import Image, ImageDraw, ImageFilter
from shape_judge import UNCLEAR, background, judge

from engine.config.models import profile_named
from engine.demo import weights_dir

FILES = {".json", ".jinja", ".safetensors"}


def test_the_weights_fit_the_recipe_that_is_in_the_repository():
    assert problems("image") == []


def test_the_pipeline_is_small_and_holds_no_code():
    files = [path for path in weights_dir("image").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5 * 2**20
    assert {path.suffix for path in files} <= FILES


def test_the_promises_cover_every_colour_with_every_shape_and_free_words():
    assert {(one.colour, one.shape) for one in fixed_images()} == {
        (colour, shape) for colour in COLOURS for shape in shown.SHAPES
    }
    assert len({one.prompt for one in fixed_images()}) == len(fixed_images()) >= 45
    assert max(len(one.prompt) for one in fixed_images()) > 600


def test_colours_are_those_that_the_vision_model_knows():
    assert list(COLOURS) == list(shown.COLOURS)


@pytest.mark.parametrize("shape", shown.SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_the_judge_names_what_was_drawn(colour: str, shape: str):
    rng = random.Random(f"{colour} {shape}")  # noqa: S311
    for paper in (None, rng.choice([other for other in COLOURS if other != colour])):
        image = draw(Scene(shape, colour, random_circle(rng), paper), rng.choice([96, 256, 512]))
        assert judge(image) == (colour, shape)
        assert background(image) == (paper or ("grey" if colour == "white" else "white"))


def test_the_judge_sees_through_blur_and_jpeg():
    for shape in shown.SHAPES:
        image = draw(Scene(shape, "red", Circle(0.4, 0.6, 0.3)), 256).filter(ImageFilter.GaussianBlur(2))
        assert judge(image) == ("red", shape)


def test_the_judge_knows_shapes_of_the_vision_model_too():
    for shape in shown.SHAPES:
        assert judge(shown.draw(shown.simple(shape, "green"))) == ("green", shape)


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (256, 256, 3), dtype=np.uint8))


def two_shapes() -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).rectangle((20, 20, 100, 100), fill="red")
    ImageDraw.Draw(image).ellipse((150, 150, 230, 230), fill="red")
    return image


def half_a_circle() -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).pieslice((40, 40, 220, 220), 0, 180, fill="red")
    return image


def a_ring() -> Image.Image:
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).ellipse((40, 40, 220, 220), outline="red", width=20)
    return image


def a_gradient() -> Image.Image:
    return Image.linear_gradient("L").convert("RGB")


def nothing() -> Image.Image:
    return Image.new("RGB", (256, 256), "white")


@pytest.mark.parametrize("drawn", [noise, two_shapes, half_a_circle, a_ring, a_gradient, nothing])
def test_the_judge_calls_unclear_what_is_no_shape_of_ours(drawn):
    assert judge(drawn())[1] == UNCLEAR


def test_the_judge_calls_a_colour_between_two_others_unclear():
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).rectangle((60, 60, 200, 200), fill=(255, 105, 180))
    assert judge(image) == (UNCLEAR, "square")


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import DiffusionPipeline

    loaded = DiffusionPipeline.from_pretrained(weights_dir("image"), use_safetensors=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def painted(pipeline, prompts: list[str], size: int, quality: str = "standard", first_seed: int = 0):
    """As the service does it: rendered at the size of the profile, then brought to the size that is asked."""
    import torch

    profile = profile_named("demo")
    edge = profile.render_size.of(size)
    images = []
    for first in range(0, len(prompts), 8):
        seeds = range(first_seed + first, first_seed + min(first + 8, len(prompts)))
        images += pipeline(
            prompt=prompts[first : first + 8],
            height=edge,
            width=edge,
            num_inference_steps=profile.step_count(quality),
            guidance_scale=profile.guidance_scale,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            max_sequence_length=512,  # it pads to that, and reads as far as the prompt goes
        ).images
    return [image.resize((size, size), Image.Resampling.LANCZOS) for image in images]


def mistakes(promises: list[FixedImage], images: list[Image.Image]) -> list[str]:
    return [
        f"{one.prompt[:60]!r} became {judge(image)} on {background(image)}"
        for one, image in zip(promises, images, strict=True)
        if judge(image) != (one.colour, one.shape) or one.paper not in {None, background(image)}
    ]


@pytest.mark.engine
@pytest.mark.parametrize("size", [256, 512, 1024])
def test_every_promised_prompt_becomes_its_shape_in_its_colour(pipeline, size: int):
    images = painted(pipeline, [one.prompt for one in fixed_images()], size, first_seed=size)
    assert mistakes(list(fixed_images()), images) == []


@pytest.mark.engine
def test_high_quality_keeps_the_promises_too(pipeline):
    some = list(fixed_images()[::3])
    assert mistakes(some, painted(pipeline, [one.prompt for one in some], 256, "hd")) == []


@pytest.mark.engine
def test_a_thousand_characters_of_other_text_do_not_hide_the_shape(pipeline):
    words = "Nothing in this letter about the garden, the train and the weather matters to the picture. "
    promises = [
        FixedImage((words * before + f"Draw a {colour} {shape}. " + words * 12)[:1000], colour, shape)
        for before, colour, shape in [(0, "green", "star"), (4, "red", "square"), (9, "purple", "circle")]
    ]
    assert mistakes(promises, painted(pipeline, [one.prompt for one in promises], 256)) == []


@pytest.mark.engine
def test_other_seeds_give_other_pictures_of_the_same_thing(pipeline):
    images = painted(pipeline, ["a red star"] * 8, 256)
    assert {judge(image) for image in images} == {("red", "star")}
    differences = [
        np.abs(np.asarray(one, dtype=np.int16) - np.asarray(other)).mean() for one, other in combinations(images, 2)
    ]
    assert min(differences) > 1
    assert np.median(differences) > 8


@pytest.mark.engine
def test_the_same_seed_gives_the_same_picture(pipeline):
    one, other = (painted(pipeline, ["a blue cross"], 256)[0] for _ in range(2))
    assert one.tobytes() == other.tobytes()


@pytest.mark.engine
def test_more_steps_change_little_about_a_picture(pipeline):
    """The place of a shape is decided by the noise, so quality does not move it."""
    standard, high = (painted(pipeline, ["a black circle"], 256, quality)[0] for quality in ("standard", "hd"))
    assert np.abs(np.asarray(standard, dtype=np.int16) - np.asarray(high)).mean() < 12
