"""What models.yaml says about image models: a shipped profile with single values changed, and mistakes named."""

from pathlib import Path

import pytest

from engine import ConfigError, load_config
from engine.config import ImageModelSpec
from engine.config.models import SIZES, profile_named, shipped

ENTRY = """
models:
  draws:
    task: image
    tier: t
    capabilities: [image_generation]
    weights: draws
    demo: image
    profile: sdxl
tiers:
  t: {models: [t]}
"""


def load(tmp_path: Path, engine: str = "", profile: str = "sdxl") -> ImageModelSpec:
    path = tmp_path / "models.yaml"
    text = ENTRY.replace("profile: sdxl", f"profile: {profile}" + (f"\n    engine: {engine}" if engine else ""))
    path.write_text(text)
    spec = load_config(path).models["draws"]
    assert spec.task == "image"
    return spec


@pytest.mark.parametrize("name", list(shipped()))
def test_every_shipped_profile_has_values_for_all_sizes_and_qualities(name: str):
    profile = profile_named(name)
    assert profile.steps.hd > profile.steps.standard
    assert all(profile.max_batch.of(size) >= 1 and profile.render_size.of(size) >= 256 for size in SIZES)


def test_a_profile_is_used_with_single_values_changed(tmp_path: Path):
    batches = '{"256x256": 16, "512x512": 8, "1024x1024": 4}'
    spec = load(
        tmp_path, f"{{steps: {{standard: 10, hd: 20}}, dtype: float32, max_batch: {batches}, max_seconds: 9.5}}"
    )
    profile = spec.profile_of(demo=False)
    assert (profile.steps.standard, profile.steps.hd, profile.dtype) == (10, 20, "float32")
    assert [profile.max_batch.of(size) for size in SIZES] == [16, 8, 4]
    assert profile.guidance_scale == profile_named("sdxl").guidance_scale
    assert spec.engine.max_seconds == 9.5


def test_the_demo_that_stands_in_is_run_in_its_own_way(tmp_path: Path):
    spec = load(tmp_path, "{steps: {standard: 10, hd: 20}}")
    assert spec.profile_of(demo=True) == profile_named("demo")


@pytest.mark.parametrize(
    ("engine", "profile", "message"),
    [
        ("", "null", "profile: must be the name of a profile, like `sdxl`, not empty"),
        ("", "sdxll", "there is no profile `sdxll`; did you mean `sdxl`?"),
        ("{negative_prompt: true}", "z-image-turbo", "needs a `guidance_scale` above 1"),
        ("{guidance_scale: 0}", "sdxl", "needs a `guidance_scale` above 1"),
        ("{steps: {standard: 10}}", "sdxl", "models.draws.engine.steps.hd: is missing"),
        ("{steps: 10}", "sdxl", "models.draws.engine.steps: must be a mapping"),
        (
            '{render_size: {"256x256": 250, "512x512": 512, "1024x1024": 1024}}',
            "sdxl",
            "engine.render_size.256x256: must",
        ),
        ('{max_batch: {"256x256": 0, "512x512": 1, "1024x1024": 1}}', "sdxl", "engine.max_batch.256x256: must"),
        ("{batching: step}", "sdxl", "did you mean `steps`?"),
        ("{max_num_seqs: 3}", "sdxl", "models.draws.engine.max_num_seqs: unknown key"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, engine: str, profile: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, engine, profile)
    assert message in caught.value.message


def test_a_demo_that_is_not_there_is_named_when_the_file_is_read(tmp_path: Path):
    path = tmp_path / "models.yaml"
    path.write_text(ENTRY.replace("demo: image", "demo: imge"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "there is no demo `imge`; did you mean `image`?" in caught.value.message
