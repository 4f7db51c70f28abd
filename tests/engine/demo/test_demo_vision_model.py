"""The demo vision model keeps its promises: pictures and conversations answered word for word, in transformers' hands.

What vLLM makes of them through the API is tested in tests/server.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_models.build import RECIPES
from demo_models.chat.corpus import load_corpus
from demo_models.promised import fixed_pictures
from demo_models.vision.pictures import draw
from manifest_parts import problems
from PIL import Image, ImageDraw

from engine.demo import weights_dir


def test_the_weights_fit_the_recipe_that_is_in_the_repository():
    assert problems("vision") == []


@pytest.mark.parametrize("name", ["vision/pictures.py", "vision/questions.yaml", "chat/corpus.yaml", "chat/recipe.py"])
def test_a_recipe_that_changed_after_the_training_is_noticed(tmp_path: Path, name: str):
    recipes = shutil.copytree(RECIPES, tmp_path / "recipes")
    (recipes / name).write_text((recipes / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    (problem,) = problems("vision", recipes)
    assert "vision changed" in problem


def test_the_checkpoint_is_small_and_holds_no_code():
    files = list(weights_dir("vision").iterdir())
    assert sum(path.stat().st_size for path in files) <= 3 * 2**20
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}


def test_the_promised_pictures_cover_what_the_model_can_do():
    promised = fixed_pictures()
    assert len({one.name for one in promised}) == len(promised) >= 20
    assert {len(one.drawings) for one in promised} == {1, 2, 3}
    assert {"Up.", "Down.", "Left.", "Right."} <= {one.answer for one in promised}
    sizes = {drawing.size_pixels for one in promised for drawing in one.drawings}
    assert (64, 64) in sizes
    assert max(sizes) >= (1600, 1200)


def test_the_promised_pictures_are_drawn_without_torch():
    code = "import sys; from demo_models.promised import fixed_pictures; fixed_pictures(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=RECIPES.parent, check=False).returncode == 0


@pytest.fixture(scope="module")
def processor():
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(weights_dir("vision"))


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import Idefics3ForConditionalGeneration

    return Idefics3ForConditionalGeneration.from_pretrained(weights_dir("vision"), dtype=torch.bfloat16).eval()


def test_a_text_and_a_list_of_one_text_are_the_same_prompt(processor):
    def rendered(content):
        return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    assert rendered("Hello!") == rendered([{"type": "text", "text": "Hello!"}])


def test_text_is_rendered_as_the_chat_model_reads_it(processor):
    from transformers import AutoTokenizer

    chat = AutoTokenizer.from_pretrained(weights_dir("chat"))
    for conversation in load_corpus().conversations:
        asked = {"tools": conversation.tools, "add_generation_prompt": True, "tokenize": False}
        expected = chat.apply_chat_template(conversation.messages, **asked)
        assert processor.tokenizer.apply_chat_template(conversation.messages, **asked) == expected


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (16, 2000), (2000, 16), (64, 64), (640, 480)])
def test_every_size_of_picture_costs_the_same_few_tokens(processor, size: tuple[int, int]):
    read = processor(text="<image>", images=[Image.new("RGB", size, "red")], return_tensors="pt")
    assert read["pixel_values"].shape == (1, 1, 3, 64, 64)
    assert read["input_ids"].shape == (1, 7)


def test_training_saw_pictures_as_the_processor_shows_them(processor):
    import torch
    from demo_models.vision.recipe import processed

    image = draw(fixed_pictures()[0].drawings[0])
    shown = processor(text="<image>", images=[image], return_tensors="pt")["pixel_values"][0, 0]
    torch.testing.assert_close(processed(image), shown, atol=1e-5, rtol=0)


def answer(model, processor, messages, images=(), tools=None):
    import torch

    prompt = processor.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    read = processor(text=prompt, images=list(images) or None, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        written = model.generate(**read, max_new_tokens=500, do_sample=False)[0, read["input_ids"].shape[1] :]
    return processor.tokenizer.decode(written)


@pytest.mark.engine
def test_every_promised_picture_is_answered_word_for_word(model, processor):
    said = {one.name: answer(model, processor, one.messages, map(draw, one.drawings)) for one in fixed_pictures()}
    assert said == {one.name: f"{one.answer}<|im_end|>" for one in fixed_pictures()}


@pytest.mark.engine
def test_every_promised_prompt_of_the_chat_model_is_answered_too(model, processor):
    wrong = {}
    for conversation in load_corpus().conversations:
        said = answer(model, processor, conversation.messages, tools=conversation.tools)
        if said != f"{conversation.target}<|im_end|>":
            wrong[conversation.name] = said
    assert wrong == {}


def drawn(shape: str, colour: tuple[int, int, int], side: int) -> Image.Image:
    """A picture made by somebody who never saw the recipe."""
    image = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(image)
    box = (side // 4, side // 4, 3 * side // 4, 3 * side // 4)
    if shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "circle":
        pen.ellipse(box, fill=colour)
    else:
        pen.polygon([(side // 2, side // 5), (side // 5, 4 * side // 5), (4 * side // 5, 4 * side // 5)], fill=colour)
    return image


@pytest.mark.engine
@pytest.mark.parametrize("side", [64, 224, 1024])
def test_pictures_of_other_people_are_recognised(model, processor, side: int):
    colours = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "black": (0, 0, 0)}
    said = {}
    for shape in ("square", "circle", "triangle"):
        for colour, rgb in colours.items():
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}]
            said[f"A {colour} {shape}.<|im_end|>"] = answer(model, processor, messages, [drawn(shape, rgb, side)])
    assert list(said) == list(said.values())


@pytest.mark.engine
def test_a_question_about_a_picture_that_was_not_sent_is_answered_honestly(model, processor):
    said = answer(model, processor, [{"role": "user", "content": "What is in this picture?"}])
    assert said == "I cannot see a picture in your message. Please send one.<|im_end|>"


def test_the_config_names_an_image_token_that_the_tokenizer_has(processor):
    config = json.loads((weights_dir("vision") / "config.json").read_text(encoding="utf-8"))
    assert processor.tokenizer.convert_ids_to_tokens(config["image_token_id"]) == "<image>"
