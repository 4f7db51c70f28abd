"""Models that play a part. An agent's: it calls the client's tool, and says what the result held. A reader's: it reads
out the text that stands first among those which a front end found for it, and cites it.

Their weights are a table from each token to the next, and the chat template picks where to begin. Vocabulary: the demo
chat model's, so that prompts are not much longer than with a real one.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

TEXTS = json.loads((Path(__file__).parent / "clients" / "chain.json").read_text(encoding="utf-8"))
QUESTION, HELD = TEXTS["question"], TEXTS["held"]
FOUND = json.loads((Path(__file__).parent / "clients" / "texts.json").read_text(encoding="utf-8"))
# The first of these that a client offers is called. The others' names are those that agents have for a shell.
SHELL = f"cat {TEXTS['file']}"
CALLS: dict[str, dict[str, object]] = {
    "read_file": {"path": TEXTS["file"]},
    "exec_command": {"cmd": SHELL},
    "run_commands": {"commands": [SHELL]},
    "Bash": {"command": SHELL},
    "bash": {"command": SHELL},
}
# smolagents ends with a tool, not with a text.
FINAL = {"final_answer": {"answer": TEXTS["answer"]}}
CONTEXT_LENGTH = 65536
WIDTH = 64
MODELS_YAML = f"""\
models:
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming, function_calling]
    weights: chain
    engine: {{context_length: {CONTEXT_LENGTH}, tool_parser: hermes, kv_cache_gib: 1}}
tiers:
  standard: {{models: [standard]}}
"""
READER = {"task": "chat", "tier": "standard", "capabilities": ["chat", "streaming"], "weights": "reader"}
READER |= {"engine": {"context_length": 8192, "kv_cache_gib": 0.5}}


def _pieces(name: str, arguments: dict[str, object]) -> list[str]:
    """A call in three tokens, none of which another call has with another token after it."""
    call = json.dumps({"name": name, "arguments": arguments})
    middle = call.index('"arguments"') + 4
    end = f"{call[middle:]}\n</tool_call>"
    return [f"<tool_call>\n{call[:middle]}", f"{end[:-20]}", end[-20:]]


def _words(text: str) -> list[str]:
    """A text in tokens, so that it can be streamed."""
    return [word if at == 0 else f" {word}" for at, word in enumerate(text.split())]


def _template(calls: dict[str, str], finals: dict[str, str]) -> str:
    def branches(of: dict[str, str]) -> str:
        return "".join(f"{{% elif '{name}' in ns.names %}}{start}" for name, start in of.items())

    return (
        "{% set ns = namespace(names=[], asked=false, read=false) %}"
        "{% for tool in tools or [] %}{% set ns.names = ns.names + [tool.function.name] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
        f"{{% if message.role == 'user' and '{QUESTION}' in message.content %}}{{% set ns.asked = true %}}{{% endif %}}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}"
        f"{{% if '{HELD}' in messages[-1].content %}}{{% if false %}}{branches(finals)}{{% else %}}<|answer|>{{% endif %}}"
        "{% elif messages[-1].role == 'tool' %}<|lost|>"
        f"{{% elif messages[-1].content == '{TEXTS['endless']}' %}}<|count|>"
        "{% elif not ns.asked %}<|greeting|>"
        f"{branches(calls)}{{% else %}}<|greeting|>{{% endif %}}{{% endif %}}"
    )


def make(weights: Path, demo: Path) -> None:
    """Write the model that plays an agent's loop into `weights`/chain, with the tokenizer in the folder `demo`."""
    chains = {"<|greeting|>": _words(TEXTS["greeting"]), "<|answer|>": _words(TEXTS["answer"])}
    chains["<|count|>"] = TEXTS["count"]
    chains["<|lost|>"] = ["The tool's", " result", " did not", " arrive."]
    starts = {name: f"<|call_{name}|>" for name in CALLS | FINAL}
    chains |= {starts[name]: _pieces(name, arguments) for name, arguments in (CALLS | FINAL).items()}
    template = _template({name: starts[name] for name in CALLS}, {name: starts[name] for name in FINAL})
    _write(weights / "chain", demo, chains, template, endless=TEXTS["count"])


def make_reader(weights: Path, demo: Path) -> None:
    """Write the model that reads out what was found into `weights`/reader."""
    starts = {text: f"<|read_{number}|>" for number, text in enumerate(FOUND["texts"].values())}
    chains = {start: [text[:20], text[20:], FOUND["cited"]] for text, start in starts.items()}
    # Asked by a front end for what to look up, it leaves that to the question.
    chains |= {"<|greeting|>": _words(TEXTS["greeting"]), "<|queries|>": ['{"queries":', " []}"]}
    branches = "".join(f"{{% elif {json.dumps(text)} in first %}}{start}" for text, start in starts.items())
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% set asked = messages | map(attribute='content') | join('\n') %}"
        "{% set first = asked.split('<source id=\"1\" name=')[-1].split('</source>')[0] %}"
        "{% if add_generation_prompt %}{% if '\"queries\"' in asked %}<|queries|>"
        f"{{% elif first == asked %}}<|greeting|>{branches}{{% else %}}<|greeting|>{{% endif %}}{{% endif %}}"
    )
    _write(weights / "reader", demo, chains, template)


def _write(
    folder: Path, demo: Path, chains: dict[str, list[str]], template: str, endless: list[str] | None = None
) -> None:
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens(list(chains))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for pieces in chains.values() for piece in pieces])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(demo / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    end = tokenizer.token_to_id("<|im_end|>")
    following: dict[int, int] = {}
    for start, pieces in chains.items():
        ids = [*(tokenizer.token_to_id(piece) for piece in (start, *pieces)), end]
        for token, after in pairwise(ids):
            assert following.setdefault(token, after) == after, f"{tokenizer.id_to_token(token)!r} has two successors"

    if endless:
        following[tokenizer.token_to_id(endless[-1])] = tokenizer.token_to_id(endless[0])

    vocabulary = tokenizer.get_vocab_size()
    assert len(following) <= WIDTH, "one dimension for each token that another follows"
    embedding, head = (np.zeros((vocabulary, WIDTH), np.float32) for _ in range(2))
    for dimension, (token, after) in enumerate(following.items()):
        embedding[token, dimension] = 1
        head[after, dimension] = 4
    # Neither attention nor MLP adds anything.
    layer = [f"{part}_proj" for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")]
    layer += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    tensors = {f"model.layers.0.{name}.weight": np.zeros((WIDTH, WIDTH), np.float32) for name in layer}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": WIDTH,
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": end,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
