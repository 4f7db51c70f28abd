"""Compiled models on a CPU: has vLLM load at a start what it compiled at an earlier one, and compile nothing else.

Runs in the engine's process.
"""

from __future__ import annotations

import os
from typing import Any

_DISABLE = "TORCHDYNAMO_DISABLE"


def compile_only_models() -> None:
    """Let models be compiled where torch's compiler is off otherwise (vllm_launch.py says why). Safe to call twice."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

    if "hearth_inherited" in vars(Wrapper):
        return
    inherited = Wrapper.hearth_inherited = Wrapper.__init__

    def __init__(wrapper: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807  # takes its place
        before = os.environ.pop(_DISABLE, None)  # torch looks at it when a function is handed to its compiler
        try:
            inherited(wrapper, *arguments, **named)
        finally:
            if before is not None:
                os.environ[_DISABLE] = before

    Wrapper.__init__ = __init__


def load_what_was_compiled() -> None:
    """Mend vLLM 0.32, which cannot load code for a CPU: it asks for a method that only code for a GPU has.

    Without it each start compiles again (10 s and more). Safe to call twice.
    """
    import torch

    if getattr(torch.compiler.load_compiled_function, "of_hearth", False):
        return
    inherited = torch.compiler.load_compiled_function

    def load_compiled_function(*arguments: Any, **named: Any) -> Any:
        loaded = inherited(*arguments, **named)
        compiled = loaded._artifacts.compiled_fn  # noqa: SLF001  # as vLLM does
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None  # it is loaded whole
        return loaded

    load_compiled_function.of_hearth = True  # type: ignore[attr-defined]
    torch.compiler.load_compiled_function = load_compiled_function
