"""Why an engine did not start, in one line, and whether it is worth another try."""

from pathlib import Path

import pytest

from engine.backends.vllm.processes import causes_told, job
from engine.errors import LoadError, StartError


class StrictValidationError(Exception):
    """Like huggingface_hub's: no `ValueError`."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes leave their causes."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (RuntimeError("head_dim=16\n  is\tnot supported"), LoadError, "RuntimeError: head_dim=16 is not supported"),
        (KeyError("layers.0.q"), LoadError, "KeyError: 'layers.0.q'"),
        (NotImplementedError(), LoadError, "NotImplementedError"),
        (ValueError("larger than the model's max seq len (4096) of memory"), LoadError, "max seq len"),
        (ValueError("/srv/weights/mine/config.json is bad"), LoadError, "ValueError: config.json is bad"),
        (
            ValueError("1 validation error for ModelConfig\n  Value error, no [type=value_error, input_value=7]\n  x"),
            LoadError,
            "ValueError: no ",
        ),
        (
            ValueError("max_model_len (9) is greater than 4. " + "x" * 150 + " may cause CUDA errors"),
            LoadError,
            "greater",
        ),
        (StrictValidationError("'vocab_size' expected int"), LoadError, "vocab_size"),
        (RuntimeError("CUDA error: unspecified launch failure"), StartError, "CUDA error"),
        (RuntimeError("can't allocate memory: you tried"), StartError, "allocate"),
        (ValueError("Free memory on device (1 GiB) is less than desired"), StartError, "Free memory"),
        (OSError(5, "Input/output error"), StartError, "Input/output error"),
        (RuntimeError("Engine core initialization failed. See root cause above."), StartError, "root cause"),
        (RuntimeError("x" * 1000), LoadError, "xxx ..."),
    ],
)
def test_the_cause_is_one_line_and_says_whether_it_is_certain(
    error: Exception, kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as raised, causes_told("a", may_be_the_code=False):
        raise error
    message = str(raised.value)
    assert line in message
    assert "\n" not in message
    assert "/srv" not in message
    assert len(message) < 600


def test_what_fails_with_compiled_code_may_start_without() -> None:
    with pytest.raises(StartError, match="ValueError: x"), causes_told("a", may_be_the_code=True):
        raise ValueError("x")


def test_the_cause_is_what_the_process_left(folder: Path) -> None:
    def start() -> None:
        with causes_told("a", may_be_the_code=False):
            assert job.failure is not None
            job.failure.write_text('{"line": "RuntimeError: head_dim=16", "is_certain": true}')
            raise RuntimeError("Engine core initialization failed.")

    with pytest.raises(LoadError, match="a: RuntimeError: head_dim=16"):
        start()
    assert list(folder.iterdir()) == []
    assert job.failure is None
