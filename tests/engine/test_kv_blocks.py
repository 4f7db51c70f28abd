"""The plan's arithmetic of KV blocks is vLLM's own, and no plan has more requests run than there are blocks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_parts import config_of, model, shipped, variant
from test_golden_plans import SHAPES

from engine.config import ChatModelSpec
from engine.config.models import SpeculativeSpec
from engine.placement.hardware import GIB, imagined
from engine.placement.needs import ContextNeeds, own_folders
from engine.placement.plan import plan
from engine.placement.types import KvCache, Need, Plan

# What the config.json of these models says of their KV cache, as published.
CONFIGS = json.loads(Path(__file__).with_name("kv_shapes.json").read_text())
SHIPPED = {
    "qwen3.6-27b-fp8": "qwen3.6-27b",
    "qwen3.6-27b-awq": "qwen3.6-27b",
    "qwen3.6-35b-a3b-fp8": "qwen3.6-35b-a3b",
    "qwen3.6-35b-a3b-nvfp4": "qwen3.6-35b-a3b",
    "qwen3.5-122b-a10b-fp8": "qwen3.5-122b-a10b",
    "qwen3.5-9b-fp8": "qwen3.5-9b",
    "qwen3.5-4b-fp8": "qwen3.5-4b",
    "qwen3.5-4b": "qwen3.5-4b",
    "qwen3.5-2b": "qwen3.5-2b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "qwen3-4b-instruct-2507-fp8": "qwen3-4b-2507",
    "qwen3-4b-instruct-2507": "qwen3-4b-2507",
    "qwen3-1.7b-fp8": "qwen3-1.7b",
    "qwen3-1.7b": "qwen3-1.7b",
}
H100 = 80 * GIB
FILE = shipped()

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it is imported


def ours(name: str, split: int = 1) -> KvCache:
    return ContextNeeds.of(CONFIGS[name]).cache(split, H100)


class Vllm:
    """A model's KV cache as vLLM 0.32 lays it out on an H100, by its own code; only the configuration is ours."""

    def __init__(self, config: dict, split: int, least_block: int, guessed: int = 0) -> None:
        import torch
        from vllm.platforms.interface import Platform
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
        from vllm.v1.kv_cache_layout import KVCacheLayout

        text = config.get("text_config") or config
        layers = text["num_hidden_layers"]
        kinds = text.get("layer_types") or [
            "linear_attention" if (at + 1) % text.get("full_attention_interval", 1) else "full_attention"
            for at in range(layers)
        ]
        kv_heads = max(1, text["num_key_value_heads"] // split)
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=least_block,
                cache_dtype="auto",
                mamba_cache_dtype="auto",
                mamba_ssm_cache_dtype=text.get("mamba_ssm_dtype", "auto"),
                mamba_cache_mode="align",
                mamba_page_size_padded=None,
                num_gpu_blocks_override=None,
                prefix_cache_retention_interval=None,
                get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            ),
            model_config=SimpleNamespace(
                architecture="Qwen3NextForCausalLM",
                dtype=torch.bfloat16,
                use_mla=False,
                max_model_len=text["max_position_embeddings"],
                original_max_model_len=text["max_position_embeddings"],
                hf_text_config=SimpleNamespace(**text),
                get_num_kv_heads=lambda _: kv_heads,
                get_head_size=lambda: text["head_dim"],
                model_impl="vllm",
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=split, decode_context_parallel_size=1),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            attention_config=SimpleNamespace(hisparse_config=None),
            compilation_config=SimpleNamespace(static_forward_context={}),
            speculative_config=None,
            num_speculative_tokens=guessed,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=2 * 8192,
        )
        cache = self.config.cache_config
        heads = {"num_kv_heads": kv_heads, "head_size": text["head_dim"], "dtype": torch.bfloat16}
        if "linear_attention" in kinds:
            from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

            # A state with guesses keeps the tokens before it, too
            self.config.speculative_config = SimpleNamespace(num_speculative_tokens=guessed)
            Platform._align_hybrid_block_size(self.config, FlashAttentionBackend)
            state = MambaSpec(
                shapes=Qwen3NextForCausalLM.get_mamba_state_shape_from_config(self.config),
                dtypes=Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(self.config),
                block_size=cache.block_size,
                page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode="align",
                num_speculative_blocks=guessed,
            )
            self.config.speculative_config = None
        make = {
            "full_attention": lambda: FullAttentionSpec(block_size=cache.block_size, **heads),
            "sliding_attention": lambda: SlidingWindowSpec(
                block_size=cache.block_size, sliding_window=text["sliding_window"], **heads
            ),
            "linear_attention": lambda: state,
        }
        self.specs = {f"layer.{at}": make[kind]() for at, kind in enumerate(kinds)}

    def at(self, cache_bytes: int, context: int) -> tuple[int, float]:
        """Return the blocks of a cache, and how many conversations of that length have room in it."""
        from vllm.v1.core import kv_cache_utils

        self.config.model_config.max_model_len = context
        (found,) = kv_cache_utils.get_kv_cache_configs(self.config, [dict(self.specs)], [cache_bytes])
        return found.num_blocks, kv_cache_utils.get_max_concurrency_for_kv_cache_config(self.config, found)


@pytest.mark.engine  # imports vLLM
@pytest.mark.parametrize("least_block", [16, 128])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_and_conversations_are_those_of_vllm(name: str, split: int, least_block: int):
    theirs, cache = Vllm(CONFIGS[name], split, least_block), ours(name, split)
    if least_block == 128:  # with other kernels than those of an H100
        cache = cache.coarse()
    for context in (4096, 32768, 40960):
        for size in (cache.bytes_of(1, context), 9 * GIB + 12345, 40 * GIB):
            if size < cache.bytes_of(1, context):
                continue
            assert cache.longest(size, context) == context
            blocks, chats = theirs.at(size, context)
            assert (cache.blocks(size), cache.blocks_of_chat(context)) == (blocks, pytest.approx(blocks / chats))
        with pytest.raises(ValueError, match="at least one request"):
            theirs.at(cache.bytes_of(1, context) - 1, context)


@pytest.mark.engine
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("name", CONFIGS)
def test_with_guesses_vllm_has_room_for_what_is_planned_and_hardly_more(name: str, method: str, split: int):
    guesses = SpeculativeSpec(method=method, tokens=3)
    theirs = Vllm(CONFIGS[name], split, 16, guesses.tokens)
    cache = ContextNeeds.of(CONFIGS[name]).cache(split, H100, speculative=guesses)
    for context in (4096, 32768):
        size = cache.bytes_of(4, context)
        blocks, chats = theirs.at(size, context)
        assert 4 <= chats <= 6
        assert method == "mtp" or cache.blocks(size) <= blocks  # the layer for guesses is not among theirs


def test_blocks_and_conversations_are_those_that_were_published():
    # One H100 with 41 GiB of KV cache: "exceeds available Mamba cache blocks (856)" (vllm-project/recipes 551)
    assert ours("qwen3.6-27b").block_tokens == 784
    assert ours("qwen3.6-27b").blocks(41 * GIB) == 856
    # Two GPUs with 3.86 GiB each: 161 blocks (vllm 49064)
    assert ours("qwen3.6-27b", split=2).blocks(int(3.86 * GIB)) == 161


@given(
    st.sampled_from([1536, 16384, 131_072]),
    st.sampled_from([(1, None, 0), (1, 4096, 0), (4, 1024, 0), (2, None, 10**6), (4, None, 70 * 2**20)]),
    st.integers(2, 262_144),
)
def test_a_conversation_gets_what_it_takes_in_blocks_of_either_size_and_no_byte_more(
    token_bytes: int, kind: tuple[int, int | None, int], tokens: int
):
    groups, window, state = kind
    cache = KvCache.of(token_bytes, groups=groups, window=window, state_bytes=state, gpu_bytes=24 * GIB)
    (one,) = model("a", variant("v", 1)).variants
    need = Need(one, 1, 0, 0, cache=cache, context_length=1, longest_context=tokens)
    assert need.context_in(need.chat_bytes(tokens)) == tokens
    assert need.context_in(need.chat_bytes(tokens) - 1) < tokens


def test_the_shipped_variants_say_what_their_configurations_say(tmp_path: Path):
    variants = {one.id: one for spec in FILE.models.values() if spec.task == "chat" for one in spec.variants}
    assert sorted(variants) == sorted(SHIPPED)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.safetensors").write_bytes(b"x" * 1000)
    for name, shape in SHIPPED.items():
        for split in variants[name].tensor_parallel_sizes:
            machine = imagined("8x80" if variants[name].runs_on != "cpu" else "cpu", ram_gib=256)
            (tmp_path / "own" / "config.json").write_text(json.dumps(CONFIGS[shape]))
            length, chats = 8192, variants[name].chats
            stated = variants[name].model_dump(exclude={"id", "lacks"}) | {
                "folder": name,
                "tensor_parallel_sizes": [split],
            }
            assert stated["max_context_length"] == ContextNeeds.of(CONFIGS[shape]).positions
            fixed = {"context_length": length, "chats": chats}
            spec = model("own", stated | fixed)
            own = own_folders(config_of(spec), tmp_path)["own"][0].model_dump(exclude={"id", "lacks"}) | {
                "folder": name
            }
            read = model("own", own | fixed | {"tensor_parallel_sizes": [split], "weights_gib": 1})
            caches = [_planned(machine, one).models[0].need.cache for one in (spec, read)]
            assert caches[0] == caches[1]


def _planned(machine, *models) -> Plan:
    found = plan(config_of(*models), machine)
    assert isinstance(found, Plan), found
    return found


def blocks_are_enough(found: Plan) -> None:
    for use in found.devices:
        assert use.used_bytes <= use.device.budget_bytes
    for one in found.models:
        cache = one.need.cache if one.need else None
        if cache is None or one.variant is None:
            continue
        running = one.sequences or one.need.sequences
        assert 1 <= running <= one.need.sequences
        if cache.state_groups:
            assert running < cache.blocks(one.kv_bytes)
        assert one.chats >= 1
        assert one.need.context_length <= one.context_length <= max(one.need.context_length, one.need.longest_context)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_golden_plan_has_blocks_for_all_that_may_run(shape: str):
    found = plan(FILE, imagined(shape))
    assert isinstance(found, Plan)
    blocks_are_enough(found)


_sizes = st.lists(st.integers(6, 200), max_size=8)


@settings(max_examples=500)
@given(_sizes, st.sampled_from([16, 64, 256, 1024]), st.integers(1, 1024))
def test_any_machine_has_blocks_for_all_that_may_run(sizes: list[int], ram_gib: int, asked: int):
    models = [
        spec.model_copy(update={"engine": spec.engine.model_copy(update={"max_num_seqs": asked})})
        if isinstance(spec, ChatModelSpec)
        else spec
        for spec in FILE.models.values()
    ]
    machine = "+".join(f"{size}GiB" for size in sizes) or "cpu"
    found = plan(config_of(*models), imagined(machine, ram_gib=ram_gib))
    assert isinstance(found, Plan)
    blocks_are_enough(found)


def test_an_own_folder_with_linear_attention_is_capped_too(tmp_path: Path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(CONFIGS["qwen3.5-9b"]))
    (tmp_path / "own" / "model.safetensors").write_bytes(b"x")
    spec = model("own")
    found = plan(config_of(spec), imagined("1x6"), folders=own_folders(config_of(spec), tmp_path))
    assert isinstance(found, Plan)
    blocks_are_enough(found)
    assert found.models[0].sequences is not None
