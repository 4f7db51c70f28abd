"""A program: makes a tiny random model with linear attention, loads it, asks it, prints JSON of its KV cache."""

import asyncio
import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

from engine import ChatRequest, Engine, load_config
from engine.demo import weights_dir
from engine.stream import TokenStream, fold

MODEL = "service-plus"


def make(folder: Path) -> None:
    shutil.copytree(weights_dir("chat"), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = json.loads((weights_dir("chat") / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([mark for mark in ("<think>", "</think>") if mark not in tokenizer.get_vocab()])
    tokenizer.save_pretrained(folder)
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


async def main(folder: Path) -> None:
    """Load, ask, end."""
    logging.basicConfig(level=logging.INFO)
    make(folder / "own")
    (folder / "models.yaml").write_text(
        f"models:\n  {MODEL}: {{task: chat, tier: t, capabilities: [chat], weights: own,"
        " engine: {kv_cache_gib: 0.0625, context_length: 4096, tool_parser: none, reasoning_parser: qwen3}}\n"
        "tiers:\n  t: {models: [t]}\n"
    )
    engine = Engine(load_config(folder / "models.yaml"), weights_dir=folder)
    await engine.start()
    while engine.health()[0].status not in {"ready", "failed"}:
        await engine.wait_for_change()
    try:
        asked = ChatRequest(request_id="a", model=MODEL, messages=[{"role": "user", "content": "?"}], max_tokens=6)
        answers = [engine.chat(replace(asked, request_id=str(at), ignore_eos=True), TokenStream()) for at in range(20)]
        tokens = [(await fold(await each)).usage.completion_tokens for each in answers]
        room = engine._chat_backend(MODEL, MODEL)[0].admission._room
        groups = [[group.block_tokens, group.most_blocks] for group in room.kv_groups]
        able = engine.models()[0].capabilities
        found = {"tokens": tokens, "room": room.kv_room, "groups": groups, "capabilities": able}
        sys.stdout.write(json.dumps(found) + "\n")
    finally:
        await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
