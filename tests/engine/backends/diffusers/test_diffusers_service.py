"""The service of images as its worker runs it, in this process, on tiny random pipelines."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from image_studio import SMALL, Studio, apart, opened
from recorder import Recorder
from safetensors.torch import load_file, save_file

from engine import GenerationError, LoadError, RequestError
from engine.backends.diffusers.service import RequestService, StepService, load
from engine.config.models import profile_named
from engine.errors import StartError
from engine.types import Edit, FinishedImage, ImageEvent, ImageJob, ImageProgress, PartialImage, Picture


@pytest.fixture(params=["steps", "requests"])
def studio(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Studio:
    return Studio(folders("z_image"), {"batching": request.param})


@pytest.fixture
def by_steps(folders: Callable[[str], Path]) -> Studio:
    return Studio(folders("z_image"), {})


@pytest.fixture
def by_requests(folders: Callable[[str], Path]) -> Studio:
    return Studio(folders("z_image"), {"batching": "requests"})


def test_a_service_joins_as_its_profile_says_and_starts_with_nothing_to_do(by_steps: Studio, by_requests: Studio):
    assert isinstance(by_steps.service, StepService)
    assert isinstance(by_requests.service, RequestService)
    assert by_steps.phases == ["loading the pipeline", "making a first image"]
    assert not by_steps.service.busy
    assert by_steps.recorder.events == {}


def test_every_step_of_an_image_is_told_and_then_its_file(studio: Studio):
    studio.submit(1)
    studio.submit(2, quality="hd")
    studio.run()
    assert studio.steps(1) == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert studio.steps(2)[-1] == (6, 6)
    assert studio.recorder.events[1][-1].steps == 4
    assert studio.file(1) != studio.file(2)


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_a_file_has_exactly_the_size_asked_for(studio: Studio, size: int):
    studio.submit(1, size=size)
    studio.run()
    assert opened(studio.file(1)).size == (size, size)


@pytest.mark.parametrize(("output_format", "name"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_a_file_has_the_format_asked_for_and_is_marked(by_steps: Studio, output_format: Any, name: str):
    by_steps.submit(1, prompt="a secret lamp", output_format=output_format)
    by_steps.run()
    picture = opened(by_steps.file(1))
    mark = picture.info["xmp"]
    assert picture.format == name
    assert b"trainedAlgorithmicMedia" in (mark if isinstance(mark, bytes) else mark.encode())
    assert b"secret" not in by_steps.file(1)


def test_the_quality_of_a_jpeg_can_be_asked_for(by_steps: Studio):
    by_steps.submit(1, output_format="jpeg", compression=10)
    by_steps.submit(2, output_format="jpeg")
    by_steps.run()
    assert len(by_steps.file(1)) < len(by_steps.file(2))


def test_a_seed_means_the_same_picture_alone_in_company_and_after_a_restart(
    folders: Callable[[str], Path], by_requests: Studio
):
    alone, company = Studio(folders("z_image"), {}), Studio(folders("z_image"), {})
    alone.submit(1, seed=2**63 - 1)
    alone.submit(5, seed=2**63 - 2)
    company.submit(2, "fog", seed=7, quality="hd")
    company.service.step()
    company.submit(1, seed=2**63 - 1)
    company.service.step()
    company.submit(3, "rain over hills", size=512, seed=8)
    by_requests.submit(4, "fog", seed=7)
    by_requests.submit(1, seed=2**63 - 1)
    for studio in (alone, company, by_requests):
        studio.run()
    assert apart(alone.file(1), company.file(1)) <= 1
    assert apart(alone.file(1), by_requests.file(1)) <= 1
    assert apart(alone.file(1), alone.file(5)) > 10


def test_images_join_and_leave_between_steps(by_steps: Studio):
    by_steps.submit(1)
    by_steps.service.step()
    by_steps.submit(2)
    by_steps.service.step()
    assert (by_steps.steps(1)[-1], by_steps.steps(2)[-1]) == ((2, 4), (1, 4))
    by_steps.service.step()
    by_steps.service.step()
    assert by_steps.recorder.ends == {1: None}
    by_steps.run()
    assert by_steps.recorder.ends == {1: None, 2: None}


def test_no_more_images_share_a_step_than_there_is_room_for(by_steps: Studio):
    for number in range(3):
        by_steps.submit(number, size=512)
    by_steps.service.step()
    assert [len(by_steps.steps(number)) for number in range(3)] == [1, 1, 0]


def test_sizes_take_turns_since_a_small_image_in_the_step_of_a_large_one_costs_as_much(folders: Callable[[str], Path]):
    batch = {"256x256": 4, "512x512": 4, "1024x1024": 2}
    studio = Studio(folders("z_image"), {"max_batch": batch})
    studio.submit(1, size=1024)
    studio.submit(2)
    studio.submit(3, size=512)  # drawn as large as the one before
    studio.service.step()
    assert [len(studio.steps(number)) for number in (1, 2, 3)] == [1, 0, 0]
    studio.service.step()
    assert [len(studio.steps(number)) for number in (1, 2, 3)] == [1, 1, 1]


def test_requests_are_joined_up_to_the_room_there_is_if_they_agree(by_requests: Studio):
    by_requests.submit(1)
    by_requests.submit(2, quality="hd")
    by_requests.submit(3)
    by_requests.submit(4)
    by_requests.submit(5)
    by_requests.submit(6)
    by_requests.service.step()
    assert sorted(by_requests.recorder.ends) == [1, 3, 4, 5]
    by_requests.run()
    assert sorted(by_requests.recorder.ends) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("family", ["z_image", "sd3", "flux2_klein", "qwen_image"])
def test_images_of_one_request_are_decoded_one_by_one(folders: Callable[[str], Path], family: str):
    studio = Studio(folders(family), {"batching": "requests"})
    service: Any = studio.service
    decoded: list[int] = []
    service._pipe.vae.decoder.register_forward_hook(lambda _module, _latents, pixels: decoded.append(len(pixels)))
    for number in range(3):
        studio.submit(number)
    service.step()
    assert len(studio.recorder.ends) == 3
    assert decoded == [1, 1, 1]


def test_a_cancelled_image_takes_no_further_step(by_steps: Studio):
    by_steps.submit(1)
    by_steps.submit(2)
    by_steps.service.step()
    by_steps.service.cancel(1)
    assert by_steps.recorder.ends == {1: None}
    by_steps.service.cancel(1)
    by_steps.run()
    assert len(by_steps.steps(1)) == 1
    assert by_steps.file(2)


def test_a_call_ends_early_when_nobody_waits_for_any_of_its_images(by_requests: Studio):
    def leave() -> None:
        if len(by_requests.steps(1)) == 2:
            by_requests.service.cancel(1)
            by_requests.service.cancel(2)

    by_requests.recorder.when_polled = leave
    by_requests.submit(1)
    by_requests.submit(2)
    by_requests.run()
    assert len(by_requests.steps(1)) == 2
    assert by_requests.recorder.ends == {1: None, 2: None}
    by_requests.submit(3)
    by_requests.run()
    assert by_requests.file(3)


def test_a_call_goes_on_for_the_images_that_are_still_wanted(by_requests: Studio):
    by_requests.recorder.when_polled = lambda: by_requests.service.cancel(1)
    by_requests.submit(1)
    by_requests.submit(2)
    by_requests.run()
    assert len(by_requests.steps(1)) == 1
    assert not any(isinstance(event, FinishedImage) for event in by_requests.recorder.events[1])
    assert by_requests.file(2)


def test_previews_come_evenly_on_the_way_in_the_format_and_size_asked_for(by_steps: Studio):
    by_steps.submit(1, quality="hd", partial_images=2, output_format="webp", size=512)
    by_steps.run()
    events = by_steps.recorder.events[1]
    previews = [(place, event) for place, event in enumerate(events) if isinstance(event, PartialImage)]
    assert [event.number for _, event in previews] == [0, 1]
    assert [events[place - 1] for place, _ in previews] == [ImageProgress(0, 2, 6), ImageProgress(0, 4, 6)]
    assert {opened(event.data).size for _, event in previews} == {(512, 512)}
    assert {opened(event.data).format for _, event in previews} == {"WEBP"}


@pytest.mark.parametrize(
    ("family", "prompt", "count", "limit"),
    [("z_image", "x" * 3060, 3079, 3072), ("sd3", "x" * 76, 78, 77)],
)
def test_a_prompt_that_would_be_cut_is_refused_with_both_numbers(
    folders: Callable[[str], Path], family: str, prompt: str, count: int, limit: int
):
    studio = Studio(folders(family), {})
    with pytest.raises(
        RequestError, match=f"prompt has {count} tokens, and this model reads at most {limit} "
    ) as caught:
        studio.submit(1, prompt)
    assert caught.value.param == "prompt"
    assert not studio.service.busy
    studio.submit(2, prompt[: len(prompt) - (count - limit)])


def test_a_negative_prompt_is_refused_where_there_is_none(by_steps: Studio):
    with pytest.raises(RequestError, match="takes no negative_prompt") as caught:
        by_steps.submit(1, negative_prompt="rain")
    assert caught.value.param == "negative_prompt"


def test_a_long_prompt_of_sdxl_is_the_same_picture_step_by_step_and_as_a_whole_request(
    folders: Callable[[str], Path],
):
    options = {"guidance_scale": 4.0, "negative_prompt": True, "max_prompt_tokens": 3072}
    steps, requests = (Studio(folders("sdxl"), {**options, "batching": batching}) for batching in ("steps", "requests"))
    for studio in (steps, requests):
        studio.submit(1, "a lamp on a table " * 20, negative_prompt="rain")
        studio.submit(2, "a lamp on a table " * 20)
        studio.submit(3, "fog")
        studio.run()
    assert steps.file(1) != steps.file(2)
    for number in (1, 2, 3):
        assert apart(steps.file(number), requests.file(number)) <= 1


@pytest.mark.parametrize("family", ["sdxl", "sd3", "qwen_image", "z_image"])
def test_a_negative_prompt_changes_the_picture_and_joined_requests_agree_with_steps(
    folders: Callable[[str], Path], family: str
):
    guided = {"guidance_scale": 4.0, "negative_prompt": True}
    steps = Studio(folders(family), guided)
    requests = Studio(folders(family), {**guided, "batching": "requests"})
    for studio in (steps, requests):
        studio.submit(1, "a lamp", negative_prompt="rain and a long row of trees")
        studio.submit(2, "a lamp")
        studio.submit(3, "fog", negative_prompt="sun")
        studio.run()
    assert steps.file(1) != steps.file(2)
    for number in (1, 2, 3):
        assert apart(steps.file(number), requests.file(number)) <= 1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("flux2_klein", {"negative_prompt": True, "guidance_scale": 4.0}, "a Flux2KleinPipeline takes none"),
        ("sdxl", {"negative_prompt": True, "guidance_scale": 1.0}, "Raise guidance_scale above 1"),
    ],
)
def test_a_profile_that_promises_negative_prompts_in_vain_is_refused(
    folders: Callable[[str], Path], family: str, changes: dict[str, Any], message: str
):
    with pytest.raises(LoadError, match=message):
        Studio(folders(family), changes)


def test_running_out_of_memory_fails_who_is_running_and_the_service_lives(studio: Studio):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    service: Any = studio.service
    hook = service._pipe.transformer.register_forward_hook(full)
    studio.submit(1)
    studio.submit(2, size=1024)
    studio.service.step()
    assert list(studio.recorder.ends) == [1]
    assert isinstance(studio.recorder.ends[1], GenerationError)
    assert "ran out of memory" in studio.recorder.ends[1].message
    hook.remove()
    studio.run()
    assert studio.file(2)


def test_a_first_image_for_which_a_library_of_the_gpu_finds_no_memory_may_be_made_at_the_next_start(by_steps: Studio):
    def full(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    service: Any = by_steps.service
    service._pipe.transformer.register_forward_hook(full)
    with pytest.raises(StartError, match="did not have enough memory"):
        service.rehearse()


def test_an_image_that_is_no_number_fails_alone(by_steps: Studio):
    by_steps.submit(1)
    by_steps.submit(2)
    by_steps.service.step()
    service: Any = by_steps.service
    state = service.running[1].state
    state.latents = torch.full_like(state.latents, float("nan"))
    by_steps.run()
    assert isinstance(by_steps.recorder.ends[1], GenerationError)
    assert by_steps.file(2)


def test_sdxl_in_half_precision_makes_images_before_and_after_an_edit(folders: Callable[[str], Path]):
    """Its VAE is of another number format then: the pipeline's own decoding does not expect that."""
    pipe = load(folders("sdxl"), profile_named("sdxl", {})).to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    recorder = Recorder(ImageEvent)
    service = RequestService(pipe, profile_named("sdxl", {**SMALL, "batching": "requests"}), recorder, mark=False)
    picture = Picture(64, 64, bytes(64 * 64 * 3))
    for number, edit in enumerate((None, Edit((picture,), 0.7), None)):
        job = ImageJob("a lamp", 256, "standard", number, edit=edit)
        service.submit(number, msgspec.msgpack.encode(job))
        while service.busy:
            service.step()
        assert recorder.ends[number] is None


def test_a_model_that_makes_no_image_is_not_served(folders: Callable[[str], Path], tmp_path: Path):
    folder = shutil.copytree(folders("z_image"), tmp_path / "broken")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors["layers.0.attention.to_q.weight"].fill_(float("nan"))
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="could not make a first image"):
        Studio(folder, {})
