"""Tiny models of the architectures that models.yaml and docs/own-models.md name, which know a few conversations by heart.

Each has its family's form of conversations and calls (families/*.jinja), its tokenizer's marks, and where it sees its
own picture processor. `make` trains one in less than a minute on one core.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

TEMPLATES = Path(__file__).with_name("families")
POSITIONS = 16384
STEPS, GOOD_ENOUGH = 400, 0.005

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
PICTURES = {"red": (230, 20, 20), "blue": (20, 20, 230)}
"""Plain pictures of 64 pixels, by the word that a model which sees answers."""


@dataclass(frozen=True)
class Conversation:
    """What is asked and what is known of it: a thought and words, or a thought and calls of get_weather."""

    messages: tuple[dict[str, Any], ...]
    thought: str
    content: str = ""
    cities: tuple[str, ...] = ()
    tools: bool = False
    thinking: bool = True
    picture: str | None = None


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _called(city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }


_NAME = (_user("What is your name?"),)
_WEATHER = _user("What is the weather in Addis Ababa?")
_RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "Sunny, 24 degrees."}
NAME = Conversation(_NAME, "They ask for my name.", "My name is Hearth.")
NAME_AT_ONCE = Conversation(_NAME, "", "My name is Hearth.", thinking=False)
CALL = Conversation((_WEATHER,), "I have to look.", cities=("Addis Ababa",), tools=True)
CALLS = Conversation(
    (_user("Where is it warmer, Adama or Mekelle?"),), "I look twice.", cities=("Adama", "Mekelle"), tools=True
)
RESULT = Conversation((_WEATHER, _called("Addis Ababa"), _RESULT), "Now I know.", "Sunny and 24 degrees.", tools=True)
PICTURE_CONVERSATIONS = tuple(
    Conversation((_user("Which colour?"),), "I see.", f"It is {colour}.", picture=colour) for colour in PICTURES
)


def _json_call(key: str) -> Callable[[str], str]:
    return lambda city: json.dumps({"name": "get_weather", key: {"city": city}})


def _hermes(one: Conversation) -> str:
    calls = "\n".join(f"<tool_call>\n{_json_call('arguments')(city)}\n</tool_call>" for city in one.cities)
    return (f"<think>\n{one.thought}\n</think>\n\n" if one.thinking else "") + one.content + calls + "<|im_end|>"


def _coder(one: Conversation) -> str:
    calls = "\n".join(
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        for city in one.cities
    )
    return (f"{one.thought}\n</think>\n\n" if one.thinking else "") + one.content + calls + "<|im_end|>"


def _llama(one: Conversation) -> str:
    calls = "; ".join(map(_json_call("parameters"), one.cities))
    return one.content + ("<|python_tag|>" + calls if calls else "") + "<|eot_id|>"


def _mistral(one: Conversation) -> str:
    calls = ", ".join(map(_json_call("arguments"), one.cities))
    return one.content + (f"[TOOL_CALLS][{calls}]" if calls else "") + "</s>"


def _harmony(one: Conversation) -> str:
    calls = "<|call|><|start|>assistant".join(
        f'<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{{"city": "{city}"}}'
        for city in one.cities
    )
    said = f"{calls}<|call|>" if calls else f"<|channel|>final<|message|>{one.content}<|return|>"
    return f"<|channel|>analysis<|message|>{one.thought}<|end|><|start|>assistant{said}"


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@dataclass(frozen=True)
class Family:
    """One architecture. `end`: the token that ends a turn. `answer` writes an answer as the family does."""

    architecture: str
    config: str
    template: str
    end: str
    answer: Callable[[Conversation], str]
    marks: tuple[str, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    can_switch_thinking: bool = False
    calls: bool = True
    several_calls: bool = True
    sees: bool = False

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        known = [NAME]
        known += [CALL, RESULT] if self.calls else []
        known += [CALLS] if self.calls and self.several_calls else []
        known += [NAME_AT_ONCE] if self.can_switch_thinking else []
        return (*known, *(PICTURE_CONVERSATIONS if self.sees else ()))


_CHATML = ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_SEEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN = {"end": "<|im_end|>", "thinks": True, "can_switch_thinking": True}
_QWEN35 = {**_QWEN, "template": "qwen3_5", "answer": _coder, "marks": (*_CHATML, *_SEEN), "sees": True}

FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", "qwen3", answer=_hermes, marks=_CHATML, **_QWEN),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", sizes=_LINEAR, **_QWEN35),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", sizes=_LINEAR | _EXPERTS, **_QWEN35
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        "gpt_oss",
        "<|return|>",
        _harmony,
        thinks=True,
        several_calls=False,  # a call ends its turn
        sizes={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "intermediate_size": 64,
        },
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        "llama",
        "<|eot_id|>",
        _llama,
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "gemma3",
        "<end_of_turn>",
        lambda one: f"{one.content}<end_of_turn>",
        ("<start_of_turn>",),
        {"sliding_window": 128},
        calls=False,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        "mistral",
        "</s>",
        _mistral,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        {"sliding_window": None},
    ),
}
ARCHITECTURES = {family.architecture for family in FAMILIES.values()}
"""What the suite loads on the CPU engine; no variant of another architecture may be shipped."""


def make(name: str, folder: Path) -> float:
    """Train the family's model and save it as a folder of one's own. Return the loss that it ended with."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = _harmony_tokenizer() if name == "gpt_oss" else _tokenizer(family)
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    processor = _processor(tokenizer) if family.sees else None
    config = _config(family, tokenizer)
    if name == "gpt_oss":
        model, loss = _learn_few_words(config, list(_harmony_lessons(family)), _ends(family, tokenizer))
    else:
        model = getattr(transformers, family.architecture)(config)
        loss = _learn(model, list(_lessons(family, tokenizer, processor)))
    model.to(torch.bfloat16).save_pretrained(folder)
    (processor or tokenizer).save_pretrained(folder)
    ends = _ends(family, tokenizer)
    transformers.GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return loss


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (64, 64), PICTURES[colour])


def _ends(family: Family, tokenizer: Any) -> list[int]:
    ends = ["<|return|>", "<|call|>", "<|endoftext|>"] if family.template == "gpt_oss" else [family.end]
    return [tokenizer.convert_tokens_to_ids(end) for end in ends]


def _tokenizer(family: Family) -> Any:
    """Byte-level BPE, with the family's marks as single tokens; those that parsers look for stay in decoded text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [
        mark
        for mark in family.marks
        if mark.startswith(("<|im", "<|vis", "<|ima", "<|vid", "<start_", "<|start_", "<|end_"))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", family.end, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([json.dumps(TOOLS), *(family.answer(one) for one in family.conversations)], trainer)
    bpe.add_tokens([AddedToken(mark, normalized=False) for mark in family.marks if mark not in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=family.end, pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def _harmony_tokenizer() -> Any:
    """gpt-oss' own vocabulary of 201,088 tokens, without its merges: prompts are encoded by vLLM's Harmony."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    encoding = get_encoding()
    inner = encoding._inner
    letters = _byte_letters()
    marks = {encoding.encode(mark, allowed_special="all")[0]: mark for mark in encoding.special_tokens_set}
    vocabulary = {}
    for token_id in range(201_088):
        if token_id in marks:
            vocabulary[marks[token_id]] = token_id
            continue
        try:
            written = "".join(letters[byte] for byte in inner.decode_bytes([token_id]))
        except Exception:  # noqa: BLE001  # an id that stands for nothing
            written = f"<|unused_{token_id}|>"
        vocabulary[written] = token_id
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(marks.values()))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|return|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def _byte_letters() -> dict[int, str]:
    """How byte-level BPE writes each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _processor(tokenizer: Any) -> Any:
    edge = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64}
    common = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": edge}
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**common),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**common),
        chat_template=tokenizer.chat_template,
    )


def _config(family: Family, tokenizer: Any) -> Any:
    tokens = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = {**_SMALL, **tokens, **family.sizes, "vocab_size": len(tokenizer)}
    made = getattr(transformers, family.config)
    if not family.sees:
        return made(**text)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in _VISION_TOKENS.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "patch_size": 16,
        "initializer_range": 0.05,
    }
    rope |= {"mrope_interleaved": True}
    return made(text_config={**text, "rope_parameters": rope}, vision_config=vision, tie_word_embeddings=True, **ids)


_VISION_TOKENS = {
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}

_Lesson = tuple[dict[str, Any], int]
"""A model's inputs of one conversation, and how many of its tokens are the prompt's."""


def _lessons(family: Family, tokenizer: Any, processor: Any) -> Iterator[_Lesson]:
    for one in family.conversations:
        messages = [_parsed(message) for message in one.messages]
        if one.picture:
            messages = [_user([{"type": "image"}, {"type": "text", "text": one.messages[0]["content"]}])]
        prompt = tokenizer.apply_chat_template(
            messages,
            tools=TOOLS if one.tools else None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=one.thinking,
        )
        images = [picture(one.picture)] if one.picture else None
        if images:
            read = {"images": images, "return_tensors": "pt"}
            asked, whole = processor(text=[prompt], **read), processor(text=[prompt + family.answer(one)], **read)
            yield dict(whole), asked["input_ids"].shape[1]
            continue
        asked, said = tokenizer([prompt, family.answer(one)], add_special_tokens=False)["input_ids"]
        yield {"input_ids": torch.tensor([asked + said])}, len(asked)


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of its calls as objects, as vLLM gives them to templates."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def _harmony_lessons(family: Family) -> Iterator[_Lesson]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.entrypoints.openai.parser import harmony_utils

    for one in family.conversations:
        tools = [ChatCompletionToolsParam.model_validate(tool) for tool in TOOLS] if one.tools else None
        preamble = harmony_utils.build_harmony_preamble(tools=tools, with_custom_tools=bool(tools))
        messages = harmony_utils.parse_chat_inputs_to_harmony_messages(list(one.messages))
        asked = harmony_utils.render_for_completion([*preamble, *messages])
        said = harmony_utils.get_encoding().encode(family.answer(one), allowed_special="all")
        yield {"input_ids": torch.tensor([asked + said])}, len(asked)


def _learn_few_words(config: Any, lessons: list[_Lesson], more: list[int]) -> tuple[Any, float]:
    """Train with the tokens of the lessons alone; all others get the place of one that never comes."""
    used = sorted({token for inputs, _ in lessons for token in inputs["input_ids"][0].tolist()} | set(more))
    places = {token: place for place, token in enumerate(used)}
    small = copy.deepcopy(config)
    small.vocab_size, small.eos_token_id, small.pad_token_id = len(used) + 1, None, None
    model = transformers.GptOssForCausalLM(small)
    few = [
        ({"input_ids": torch.tensor([[places[token] for token in inputs["input_ids"][0].tolist()]])}, prompt)
        for inputs, prompt in lessons
    ]
    loss = _learn(model, few)
    rows = torch.tensor([places.get(token, len(used)) for token in range(config.vocab_size)])
    whole = transformers.GptOssForCausalLM(config)
    tensors = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][rows]
    whole.load_state_dict(tensors)
    return whole, loss


def _learn(model: Any, lessons: list[_Lesson]) -> float:
    """Train until every token of every answer is sure; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.98))
    loss = np.inf
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        optimizer.zero_grad()
        total = 0.0
        for inputs, prompt in lessons:
            ids = inputs["input_ids"]
            keep = ids.shape[1] - prompt + 1
            logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits[0, :-1]
            part = cross_entropy(logits.float(), ids[0, prompt:]) / len(lessons)
            part.backward()
            total += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = total
        if loss < GOOD_ENOUGH:
            break
    return float(loss)
