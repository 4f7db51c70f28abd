"""What a plan means for loading: the folder, the engine's values, the GPUs, and what is kept of it."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest
from plan_parts import config_of, model, shipped, variant
from serving import Server

from engine import demo
from engine.config import ChatModelSpec, ImageModelSpec, load_config
from engine.errors import LoadError, StartError
from engine.media import ImageLimits, Pictures
from engine.placement.hardware import GIB, imagined
from engine.placement.needs import Footprints, own_folders
from engine.placement.plan import plan
from engine.placement.types import Plan
from engine.pool.loader import Loader, Planned, with_fitting_context
from engine.pool.records import CompiledModels
from engine.weights.manifest import Manifest, ModelFile, write_manifest

CHATTY = variant("chatty", 4, kv_kib_per_token=128, context_length=4096, tensor_parallel_sizes=[1, 2], dtype="bfloat16")


def planned(tmp_path: Path, *models, machine: str = "2x24") -> Planned:
    return Planned(config_of(*models), tmp_path, None, imagined(machine))


def put(folder: Path) -> Path:
    """A complete folder, as a pull leaves it."""
    shutil.copytree(demo.weights_dir("chat"), folder)
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    files = tuple(
        ModelFile(path=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    )
    write_manifest(folder, Manifest(repository="a/b", revision="0" * 40, files=files))
    return folder


def test_the_demo_answers_until_the_planned_folder_is_complete(tmp_path: Path):
    spec = model("a", CHATTY, demo="chat")
    before = planned(tmp_path, spec)
    assert before.folder(spec) == (demo.weights_dir("chat"), True)
    assert before.is_demo(spec)
    shutil.copytree(demo.weights_dir("chat"), tmp_path / "chatty")  # no manifest: half of it may be missing
    assert planned(tmp_path, spec).is_demo(spec)
    shutil.rmtree(tmp_path / "chatty")
    put(tmp_path / "chatty")
    assert planned(tmp_path, spec).folder(spec) == (tmp_path / "chatty", False)


BETTER = variant("better", 8, kv_kib_per_token=128, context_length=4096)


@pytest.mark.parametrize("machine", ["2x24", "1x24"])
def test_the_best_that_is_on_the_disk_answers_though_a_better_one_could_be_fetched(
    tmp_path: Path, machine: str, caplog: pytest.LogCaptureFixture
):
    spec = model("a", BETTER, CHATTY, demo="chat")
    put(tmp_path / "chatty")
    with caplog.at_level("INFO", "hearth.plan"):
        found = planned(tmp_path, spec, machine=machine)
    assert found.folder(spec) == (tmp_path / "chatty", False)
    assert "a is served with chatty. better, which is better, fits this machine: hearth weights pull a" in caplog.text
    put(tmp_path / "better")
    assert planned(tmp_path, spec, machine=machine).folder(spec) == (tmp_path / "better", False)
    shutil.rmtree(tmp_path / "chatty")
    assert planned(tmp_path, spec, machine=machine).folder(spec) == (tmp_path / "better", False)


def test_what_is_on_the_disk_and_does_not_fit_is_not_served(tmp_path: Path):
    spec = model("a", variant("huge", 60), CHATTY, demo="chat")
    put(tmp_path / "huge")
    assert planned(tmp_path, spec, machine="1x24").is_demo(spec)


def test_a_model_with_nothing_on_the_disk_takes_no_room_from_one_that_is_here(tmp_path: Path):
    here, absent = model("a", variant("here", 20), demo="chat"), model("b", variant("absent", 20), demo="chat")
    put(tmp_path / "here")
    found = planned(tmp_path, here, absent, machine="1x24")
    assert [found.of(name).state for name in "ab"] == ["resident", "demo"]
    assert found.of("b").why == "The demo answers: none of its variants is here."


def test_the_operators_own_folder_goes_before_the_plans(tmp_path: Path):
    spec = model("a", CHATTY)
    put(tmp_path / "chatty")
    own = put(tmp_path / "a")
    assert planned(tmp_path, spec).folder(spec) == (own, False)


def test_without_any_folder_it_is_said_how_to_get_one(tmp_path: Path):
    spec = model("a", CHATTY)
    with pytest.raises(LoadError, match=r"2\. hearth weights pull a;"):
        planned(tmp_path, spec).folder(spec)


def test_a_refused_model_is_not_loaded_on_gpus_and_the_numbers_are_said(tmp_path: Path):
    spec = model("a", CHATTY, demo=None)
    config = config_of(spec, model("b", variant("huge", 400)))
    put(tmp_path / "huge")
    found = Planned(config, tmp_path, None, imagined("1x24"))
    with pytest.raises(LoadError):
        found.folder(config.models["b"])


def test_vllm_is_told_its_share_in_bytes(tmp_path: Path):
    put(tmp_path / "chatty")
    spec = model("a", CHATTY)
    found = planned(tmp_path, spec, machine="1x24")
    assert isinstance(spec, ChatModelSpec)
    engine = found.chat_spec(spec, is_demo=False).engine
    placed = found.of("a")
    assert int(engine.kv_cache_gib * GIB) == pytest.approx(placed.kv_bytes, abs=1)
    assert engine.gpu_memory_utilization == placed.utilization < 0.95
    assert (engine.context_length, engine.tensor_parallel_size, engine.dtype) == (4096, 1, "bfloat16")


def test_what_models_yaml_says_is_not_touched(tmp_path: Path):
    put(tmp_path / "chatty")
    said = {"context_length": 1024, "kv_cache_gib": 1.0, "gpu_memory_utilization": 0.5, "dtype": "float16"}
    spec = model("a", CHATTY, engine=said)
    engine = planned(tmp_path, spec).chat_spec(spec, is_demo=False).engine
    assert {key: getattr(engine, key) for key in said} == said
    open_ = model("b", CHATTY, engine={"context_length": None, "dtype": "auto", "kv_cache_gib": None})
    filled = planned(tmp_path, open_).chat_spec(open_, is_demo=False).engine
    assert (filled.context_length, filled.dtype) == (4096, "bfloat16")
    assert filled.kv_cache_gib > 0


def test_a_demo_keeps_to_its_own_values(tmp_path: Path):
    spec = model("a", CHATTY, demo="chat")
    on_gpu = planned(tmp_path, spec).chat_spec(spec, is_demo=True).engine
    assert (on_gpu.context_length, on_gpu.kv_cache_gib, on_gpu.tensor_parallel_size) == (32768, 0.0625, 1)
    on_cpu = planned(tmp_path, spec, machine="cpu").chat_spec(spec, is_demo=True).engine
    assert (on_cpu.context_length, on_cpu.kv_cache_gib, on_cpu.dtype) == (32768, 0.0625, "auto")


def test_an_image_model_is_run_by_the_profile_of_its_variant(tmp_path: Path):
    fields = variant("x", 6, profile="flux2-klein-4b", offload="model", resident_gib=3)
    spec = model("i", fields, task="image", demo="image")
    put(tmp_path / "x")
    found = planned(tmp_path, spec, machine="1x24")
    assert isinstance(spec, ImageModelSpec)
    run = found.image_spec(spec, is_demo=False)
    assert (run.profile, run.engine.offload) == ("flux2-klein-4b", "model")
    assert found.image_spec(spec, is_demo=True) == spec


def test_processes_see_the_gpus_of_their_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = [model(name, variant(f"{name}1", 18)) for name in "ab"]
    for name in "ab":
        put(tmp_path / f"{name}1")
    found = planned(tmp_path, *specs)
    seen = []
    for spec in specs:
        with found.on_its_gpus(spec):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert sorted(seen) == ["0", "1"]


def test_an_own_folder_is_planned_by_its_files(tmp_path: Path):
    shutil.copytree(demo.weights_dir("chat"), tmp_path / "a")
    spec = model("a", demo="chat")
    (found,) = own_folders(config_of(spec, model("b")), tmp_path)["a"]
    assert found.weights_gib * GIB == sum(file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors"))
    # 3 layers with a window, and none with full attention; 2 KV heads of 64, keys and values, two bytes each
    assert (found.kv_kib_per_token, found.sliding_window, found.groups) == (3 * 2 * 64 * 2 * 2 / 1024, 768, 1)
    assert (found.context_length, found.max_context_length) == (4096, 32768)
    on_cpu = plan(config_of(spec), imagined("cpu"), folders={"a": (found,)})
    assert isinstance(on_cpu, Plan)
    placed = on_cpu.of("a")
    assert placed is not None  # what it is served with: what the cache has room for
    assert (placed.context_length, placed.kv_bytes) == (32768, GIB)


def test_an_own_folder_without_a_window_keeps_every_token(tmp_path: Path):
    shutil.copytree(demo.weights_dir("chat"), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"layer_types": None}))
    (found, *_) = own_folders(config_of(model("a")), tmp_path)["a"]
    assert (found.kv_kib_per_token, found.sliding_window) == (3 * 2 * 64 * 2 * 2 / 1024, None)


def chat_with(tmp_path: Path, config: dict[str, Any], **engine: Any) -> ChatModelSpec:
    """Put a folder with this configuration there, for `with_fitting_context`."""
    shutil.copytree(demo.weights_dir("chat"), tmp_path / "a")
    before = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(before | {"layer_types": None} | config))
    spec = model("a", engine=engine)
    assert isinstance(spec, ChatModelSpec)
    return spec


def test_a_context_that_nobody_asked_for_is_cut_to_the_cache_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    spec = chat_with(tmp_path, {}, kv_cache_gib=1 / 1024)
    fitting = with_fitting_context(spec, tmp_path / "a", imagined("cpu"), chosen=True)
    # 1 MiB, 1536 bytes for a token: 5 blocks of 128 tokens, of which vLLM holds one back
    assert fitting.engine.context_length == 512
    assert "512 tokens, not 32768" in caplog.text
    assert with_fitting_context(fitting, tmp_path / "a", imagined("cpu"), chosen=False) == fitting


@pytest.mark.parametrize(
    ("config", "engine", "complaint"),
    [
        ({}, {"kv_cache_gib": 0.001, "context_length": 4096}, "4096 tokens takes 0.00604 .* lower .* to 512"),
        ({}, {"kv_cache_gib": 0.001, "dtype": "float32"}, "256 tokens takes 0.0011 GiB .* are 0.001 GiB"),
        ({"layer_types": ["sliding_attention"] * 3}, {"kv_cache_gib": 0.00001}, "are 1e-05 GiB"),
        ({"max_position_embeddings": 2**26}, {}, "`max_position_embeddings` 67108864, .* tables of 40.0 GiB"),
        ({"max_position_embeddings": 2**26}, {"context_length": 512}, "the machine has [0-9.]+ GiB"),
    ],
)
def test_a_context_without_room_is_refused_with_numbers(
    tmp_path: Path, config: dict[str, Any], engine: dict[str, Any], complaint: str
):
    spec = chat_with(tmp_path, config, **engine)
    with pytest.raises(LoadError, match=complaint):
        with_fitting_context(spec, tmp_path / "a", imagined("cpu"), chosen="context_length" not in engine)


def test_a_cache_that_is_not_like_others_is_left_to_vllm(tmp_path: Path):
    spec = chat_with(tmp_path, {"kv_lora_rank": 512}, kv_cache_gib=0.001)
    assert with_fitting_context(spec, tmp_path / "a", imagined("cpu"), chosen=True) == spec


@pytest.mark.parametrize("config", ["{", "{}", '{"num_hidden_layers": "x"}', "[]"])
def test_an_own_folder_that_says_nothing_is_left_out_of_the_account(tmp_path: Path, config: str):
    shutil.copytree(demo.weights_dir("chat"), tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(config)
    spec = model("a")
    assert own_folders(config_of(spec), tmp_path) == {"a": ()}
    assert planned(tmp_path, spec).of("a").state == "unplanned"


def test_the_shipped_demos_answer_on_any_machine_without_weights(tmp_path: Path):
    for machine in ("cpu", "1x8", "8x80"):
        found = Planned(shipped(), tmp_path, None, imagined(machine))
        assert all(found.is_demo(spec) for spec in shipped().models.values())


YAML = """\
models:
  a:
    task: chat
    tier: standard
    capabilities: [chat, streaming]
    weights: a
    demo: chat
    variants:
      - {folder: chatty, licence: Apache-2.0, weights_gib: 0.7, activations_gib: 0.2, runs_on: any, chats: 64,
         kv_kib_per_token: 1, context_length: 1024}
tiers:
  standard: {models: [standard]}
"""


@pytest.mark.engine
def test_a_planned_folder_is_served_and_what_it_took_is_kept(tmp_path: Path):
    put(tmp_path / "weights" / "chatty")
    (tmp_path / "models.yaml").write_text(YAML)
    with Server(tmp_path, environment={"HEARTH_MODELS": str(tmp_path / "models.yaml")}) as server:
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        (told,) = httpx2.get(f"{server.base_url}/models", headers=headers).json()["data"]
        assert server.stop() == 0, server.log()
    assert (told["demo"], told["context_length"]) == (False, 1024)
    (planned_variant,) = load_config(tmp_path / "models.yaml").models["a"].variants
    used = Footprints.read(server.data_dir).of(planned_variant, 0, "RAM")
    assert used is not None
    assert 0.28 * GIB < used < 2 * GIB


def test_after_a_load_without_enough_memory_context_and_sequences_follow_a_smaller_kv_cache(tmp_path: Path):
    """What a hybrid gets: vLLM does not start with more sequences than blocks."""
    shape = {"kv_kib_per_token": 32, "kv_heads": 4, "state_mib_per_chat": 49, "context_length": 8192}
    hybrid = variant("hybrid", 5.7, activations_gib=2, max_context_length=262144, min_compute_capability=8.0, **shape)
    put(tmp_path / "hybrid")
    spec = model("a", hybrid)
    found = planned(tmp_path, spec, machine="1x12")
    whole, less = (found.chat_spec(spec, is_demo=False, of_kv=part).engine for part in (1, 0.49))
    assert less.kv_cache_gib == pytest.approx(0.49 * whole.kv_cache_gib)
    assert 8192 <= less.context_length < whole.context_length
    cache = found.of("a").need.cache
    assert less.max_num_seqs <= cache.blocks(int(less.kv_cache_gib * GIB))
    assert less.max_num_seqs < whole.max_num_seqs
    assert less.gpu_memory_utilization < whole.gpu_memory_utilization


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", 0.7),
        ("ValueError: Free memory on device cuda:0 (7.1/7.8 GiB) on startup is less than desired", 0.7),
        ("RuntimeError: NCCL error", 1.0),
    ],
)
async def test_a_load_without_enough_memory_has_the_next_take_less(
    tmp_path: Path, said: str, kept: float, caplog: pytest.LogCaptureFixture
):
    spec = model("a", CHATTY, demo="chat")
    compiled = CompiledModels(None, lambda: "")
    loader = Loader(config_of(spec), tmp_path, Pictures(ImageLimits()), compiled, mark_files=False)
    loader.note_failure(spec, StartError(said))
    assert loader.part_of_kv(spec) == 1, "on a CPU nothing of that kind happens"
    loader.on_cpu = False
    loader.note_failure(spec, StartError(said))
    assert loader.part_of_kv(spec) == kept
    assert ("Its next load takes 70 % of the planned KV cache" in caplog.text) == (kept < 1)
    loader.use(config_of(spec), loader.voices)
    assert loader.part_of_kv(spec) == 1, "a reload plans anew"
