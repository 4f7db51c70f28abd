"""Tiny LoRA adapters of the demo chat model, as PEFT saves them: random ones, and ones that were taught an answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.demo import weights_dir

LAYERS = 3
# Numbers in and out of the demo's modules.
SIZES = {"self_attn.q_proj": (128, 256), "self_attn.v_proj": (128, 128), "mlp.down_proj": (256, 128)}
ALPHA = 16
Pair = tuple[torch.Tensor, torch.Tensor]


def make_adapter(
    folder: Path, *, rank: int = 4, sizes: dict[str, tuple[int, int]] | None = None, **config: Any
) -> Path:
    """Save an adapter of random numbers; `config` are more or other lines of its configuration."""
    pairs = _pairs(rank, sizes or SIZES)
    return _save(folder, {module: (first, second + 0.01) for module, (first, second) in pairs.items()}, rank, config)


def teach_adapter(folder: Path, question: list[dict[str, str]], answer: str, *, rank: int = 4) -> Path:
    """Save an adapter with which the demo gives this answer to this question."""
    import transformers

    base = weights_dir("chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt, said = tokenizer([asked, f"{answer}<|im_end|>"], add_special_tokens=False)["input_ids"]
    pairs = _pairs(rank, SIZES)
    for name, pair in pairs.items():
        model.get_submodule(name).register_forward_hook(_added(*pair, ALPHA / rank))
    optimizer = torch.optim.Adam([tensor.requires_grad_() for pair in pairs.values() for tensor in pair], lr=5e-3)
    for _ in range(300):
        optimizer.zero_grad()
        logits = model(torch.tensor([prompt + said]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(said))
        loss.backward()
        optimizer.step()
        if loss < 0.002:
            return _save(folder, pairs, rank, {})
    raise AssertionError("the adapter did not learn its answer")


def _added(first: torch.Tensor, second: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    return lambda _, inputs, output: output + scale * (inputs[0] @ first.T @ second.T)


def _pairs(rank: int, sizes: dict[str, tuple[int, int]]) -> dict[str, Pair]:
    chance = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.{module}": (
            torch.randn(rank, width, generator=chance) / width**0.5,
            torch.zeros(height, rank),
        )
        for layer in range(LAYERS)
        for module, (width, height) in sizes.items()
    }


def _save(folder: Path, pairs: dict[str, Pair], rank: int, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    tensors = {}
    for module, (first, second) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = first.detach()
        tensors[f"base_model.model.{module}.lora_B.weight"] = second.detach()
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({module.rpartition(".")[2] for module in pairs}),
        "base_model_name_or_path": "office/demo",
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder
