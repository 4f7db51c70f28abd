"""What a speech model offers: whether it is only for trying out, and what is said to who asks for another voice."""

import json
import shutil
from pathlib import Path

import pytest

from engine import Config, RequestError, load_config
from engine.demo import weights_dir
from engine.voices.catalogue import Voices

MODEL = "service-voice"
YAML = """\
models:
  service-voice:
    {task: speech, tier: standard, capabilities: [speech], weights: voices, demo: DEMO, voice_aliases: {alloy: emma, gone: anna}}
tiers:
  standard: {models: [standard]}
"""


def configured(folder: Path, *, demo: str = "voices") -> Config:
    (folder / "models.yaml").write_text(YAML.replace("DEMO", demo))
    return load_config(folder / "models.yaml")


def put_model(folder: Path, *, demo: bool, voice: str = "olga") -> Path:
    model = folder / "voices" / f"office-{voice}"
    shutil.copytree(weights_dir("voices") / "demo-en", model)
    overlay = {"demo": demo, "voices": [{"speaker": 0, "id": voice, "name": "Olga", "gender": "female"}]}
    (model / "voices.yaml").write_text(json.dumps(overlay))  # JSON is YAML
    return model


def test_a_model_is_a_demo_as_long_as_all_its_voices_are(tmp_path: Path):
    config = configured(tmp_path)
    assert Voices(config, tmp_path).of(MODEL).only_demos
    (tmp_path / "voices").mkdir()
    assert Voices(config, tmp_path).of(MODEL).only_demos
    put_model(tmp_path, demo=True)
    assert Voices(config, tmp_path).of(MODEL).only_demos
    put_model(tmp_path, demo=False, voice="anna")
    assert not Voices(config, tmp_path).of(MODEL).only_demos


def test_a_model_without_any_voice_is_no_demo(tmp_path: Path):
    assert not Voices(configured(tmp_path, demo="null"), tmp_path).of(MODEL).only_demos


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("ema", "`emma`"), ("EMMA", "`emma`"), ("aloy", "`alloy`"), ("warsam", "`warsame`"), ("hana-2", "`hana`")],
)
def test_who_asks_for_a_voice_that_is_not_there_is_told_of_those_with_such_a_name(
    tmp_path: Path, asked: str, meant: str
):
    with pytest.raises(RequestError) as caught:
        Voices(configured(tmp_path), tmp_path).find(MODEL, asked)
    assert f"Did you mean {meant}" in caught.value.message
    assert caught.value.message.count("`") <= 6
    assert caught.value.param == "voice"


@pytest.mark.parametrize("asked", ["xyzzy", "gone", "x" * 5000, "../../etc"])
def test_where_nothing_is_near_the_list_is_named_and_what_was_asked_is_not_repeated(tmp_path: Path, asked: str):
    with pytest.raises(RequestError) as caught:
        Voices(configured(tmp_path), tmp_path).find(MODEL, asked)
    assert caught.value.message == "This model has no such voice. GET /v1/audio/voices lists the ones there are."


def test_voices_that_stay_because_two_have_one_id_are_reported(tmp_path: Path):
    config = configured(tmp_path)
    first = put_model(tmp_path, demo=False)
    before = Voices(config, tmp_path)
    assert before.of(MODEL).notices == ()
    shutil.copytree(first, first.with_name("office-again"))
    after = Voices(config, tmp_path, before)
    [told] = after.of(MODEL).notices
    assert told.startswith("its voices stay as they were. Two voices have the id olga")
    assert after.of(MODEL).voices == before.of(MODEL).voices
    [told] = Voices(config, tmp_path).of(MODEL).notices
    assert told.startswith("Two voices have the id olga")
