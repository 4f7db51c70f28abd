"""Folders of chat models that were never trained: the shapes of the shipped variants, a tokenizer, and no weights.

vLLM fills such a model with random numbers (`load_format: dummy`), so a machine can be tested without a download.
Small ones, for a CPU, have the same parts with two or four narrow layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.config.models import VariantSpec
from engine.weights.manifest import Manifest, ModelFile, write_manifest

_MOE = {"num_experts": 256, "num_experts_per_tok": 8}
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
    "mamba_ssm_dtype": "float32",
}
# From each repository's config.json: layers, hidden size, intermediate size, heads, KV heads.
_QWEN35: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "qwen3.6-27b": ((64, 5120, 17408, 24, 4), {"linear_num_value_heads": 48}),
    "qwen3.5-9b": ((32, 4096, 12288, 16, 4), {"linear_num_value_heads": 32}),
    "qwen3.5-4b": ((32, 2560, 9216, 16, 4), {"linear_num_value_heads": 32, "tie_word_embeddings": True}),
    "qwen3.5-2b": ((24, 2048, 6144, 8, 2), {"linear_num_value_heads": 16, "tie_word_embeddings": True}),
    "qwen3.6-35b-a3b": (
        (40, 2048, 512, 16, 2),
        {"linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, **_MOE},
    ),
    "qwen3.5-122b-a10b": (
        (48, 3072, 1024, 32, 2),
        {"linear_num_value_heads": 64, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, **_MOE},
    ),
}
_QWEN3 = {"qwen3-4b-instruct-2507": (36, 2560, 9728, 32, 8), "qwen3-1.7b": (28, 2048, 6144, 16, 8)}
_GPT_OSS = {"gpt-oss-120b": (36, 128), "gpt-oss-20b": (24, 32)}
_SMALL_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_position_embeddings": 64}
_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_NARROW_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "visual", "linear_attn.in_proj_a", "linear_attn.in_proj_b"],
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
VISION_MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_MARKS.values())
_PLAIN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_TEMPLATE = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content }}{%- elif content -%}{%- for part in content -%}
{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ said(message.content) }}{{ (message.tool_calls or '') and message.tool_calls | tojson }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{%- endif -%}
"""
# vLLM makes the prompts itself; this tells that the model takes tools.
_HARMONY_TEMPLATE = """\
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for message in messages -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endfor -%}
<|start|>assistant"""


def shape(name: str) -> Any:
    """Return the configuration of a shipped variant, without its number format. Raises `KeyError` for others."""
    base = base_of(name)
    if base in _GPT_OSS:
        layers, experts = _GPT_OSS[base]
        return transformers.GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
    if base in _QWEN3:
        layers, width, inside, heads, kv_heads = _QWEN3[base]
        return transformers.Qwen3Config(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inside,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,
            vocab_size=151_936,
            max_position_embeddings=262_144 if "2507" in base else 40_960,
            tie_word_embeddings=True,
        )
    (layers, width, inside, heads, kv_heads), more = _QWEN35[base]
    text = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inside,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        **_LINEAR,
        **{key: value for key, value in more.items() if key != "tie_word_embeddings"},
    }
    vision = {**(_NARROW_VISION if width <= 2560 and "num_experts" not in more else _VISION), "out_hidden_size": width}
    made = transformers.Qwen3_5MoeConfig if "num_experts" in more else transformers.Qwen3_5Config
    tied = bool(more.get("tie_word_embeddings"))
    return made(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def write(variant: VariantSpec, folder: Path, *, small: bool) -> None:
    """Write a folder that Hearth takes for the whole variant. Raises `KeyError` for one of unknown shape."""
    folder.mkdir(parents=True)
    config = shape(variant.id)
    sees = hasattr(config, "vision_config")
    text = config.text_config if sees else config
    if small:
        _shrink(config, text, sees=sees)
    tokenizer = _harmony_tokenizer() if "gpt-oss" in variant.id else _tokenizer(text.vocab_size)
    if sees:
        for name, mark in VISION_MARKS.items():
            setattr(config, name, tokenizer.convert_tokens_to_ids(mark))
    for part in {id(config): config, id(text): text}.values():
        part.bos_token_id, part.eos_token_id, part.pad_token_id = None, tokenizer.eos_token_id, tokenizer.pad_token_id
    written = json.loads(config.to_json_string(use_diff=False))
    written |= {"architectures": [architecture(config)], "dtype": "bfloat16"}
    if variant.quantization and not small:
        written["quantization_config"] = _number_format(variant)
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    (_processor(tokenizer) if sees else tokenizer).save_pretrained(folder)
    # Never read: it makes the folder look like a model's.
    save_file({"unused": np.zeros(1, np.float32)}, folder / "model.safetensors")
    complete(variant, folder)


def complete(variant: VariantSpec, folder: Path) -> None:
    """Write a manifest, with which Hearth takes the folder for a fetched one; its hashes are not real."""
    files = [
        ModelFile(path=path.relative_to(folder).as_posix(), size_bytes=path.stat().st_size, sha256="0" * 64)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    write_manifest(folder, Manifest(repository=variant.repository or "none", revision="0" * 40, files=tuple(files)))


def base_of(name: str) -> str:
    """Return the name of a variant without its number format."""
    for ending in ("-fp8", "-nvfp4", "-awq"):
        name = name.removesuffix(ending)
    return name


def architecture(config: Any) -> str:
    """Return the class that a configuration is for."""
    return {
        "gpt_oss": "GptOssForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }[config.model_type]


def _shrink(config: Any, text: Any, *, sees: bool) -> None:
    small: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 32_768,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    if text.model_type == "gpt_oss":
        del small["vocab_size"]  # its prompts are written with its own words
    for key, value in small.items():
        if hasattr(text, key):
            setattr(text, key, value)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:4]
    if sees:
        halved = {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text.rope_parameters = text.rope_parameters | halved
        for key, value in (_SMALL_VISION | {"out_hidden_size": 64}).items():
            setattr(config.vision_config, key, value)


def _number_format(variant: VariantSpec) -> dict[str, Any]:
    """Return the repository's quantization config; those of RedHatAI and cyankiwi are compressed-tensors."""
    if variant.quantization == "awq" or (variant.repository or "").startswith("RedHatAI/"):
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = common | {"strategy": "channel", "dynamic": False}
        inputs: dict[str, Any] | None = common | {"strategy": "token", "dynamic": True}
        if variant.quantization == "awq":
            weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
            inputs = None
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if inputs is None else "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        }
    if variant.quantization == "nvfp4":
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "*visual*", "*linear_attn*", "*self_attn*"],
            "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        }
    return _FORMATS[variant.quantization or ""]


def _tokenizer(words: int) -> Any:
    """A token for each id that the model may generate: bytes, marks, and words without meaning."""
    names = [*bytes_to_unicode().values(), *MARKS, *_PLAIN_MARKS]
    names += [f"Ġw{number}" for number in range(words - len(names))]
    bpe = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(list(MARKS))
    bpe.add_tokens([AddedToken(mark, normalized=False) for mark in _PLAIN_MARKS])
    return _wrapped(bpe, "<|im_end|>", _TEMPLATE)


def _wrapped(bpe: Tokenizer, end: str, template: str) -> Any:
    marks = {"eos_token": end, "pad_token": "<|endoftext|>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **marks)
    made.chat_template = template
    return made


def _harmony_tokenizer() -> Any:
    """gpt-oss' own vocabulary, without its merges: prompts are encoded by vLLM's Harmony."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    encoding, letters = get_encoding(), bytes_to_unicode()
    marks = {encoding.encode(mark, allowed_special="all")[0]: mark for mark in encoding.special_tokens_set}
    names, inner = {}, encoding._inner  # noqa: SLF001  # a token's bytes are not public
    for number in range(201_088):
        try:
            written = marks.get(number) or "".join(map(letters.__getitem__, inner.decode_bytes([number])))
        except Exception:  # noqa: BLE001  # an id without a token
            written = f"<|unused_{number}|>"
        names[written] = number
    bpe = Tokenizer(models.BPE(vocab=names, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(list(marks.values()))
    return _wrapped(bpe, "<|return|>", _HARMONY_TEMPLATE)


def _processor(tokenizer: Any) -> Any:
    common = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    common["size"] = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # type: ignore[assignment]  # as published
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**common),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**common),
        chat_template=tokenizer.chat_template,
    )
