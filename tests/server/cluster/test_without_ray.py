"""What needs no cluster: one machine knows nothing of Ray, and what a cluster cannot be run with is refused in words."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_parts import CHAT, models_yaml
from serving import BIN, ROOT

from engine.errors import ContextLengthError, EngineError, OverloadedError, engine_died

BARE = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}


def test_one_machine_imports_nothing_of_ray():
    code = "import sys, server.serve, server.app, engine.engine; print([m for m in sys.modules if m.split('.')[0] == 'ray'])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def deploy(models: Path, **environment: str) -> str:
    command = [BIN / "hearth", "cluster", "deploy", "--models", models]
    done = subprocess.run(command, cwd=ROOT, env=BARE | environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


def test_sqlite_is_refused_in_words(tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed (./scripts/setup --ray)")
    models = models_yaml(tmp_path / "models.yaml", {"chat": {"models": [CHAT]}})
    said = deploy(models)
    assert "a cluster needs PostgreSQL" in said
    assert "HEARTH_FILES_URL" in said
    database = "postgresql+psycopg://hearth:secret@db.example.org/hearth"
    said = deploy(models, HEARTH_DATABASE_URL=database)
    assert "needs PostgreSQL" not in said
    assert "secret" not in said
    assert "has no section `cluster`" in deploy(
        ROOT / "models.yaml", HEARTH_DATABASE_URL=database, HEARTH_FILES_URL=tmp_path.as_uri()
    )


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("Full.", retry_after_seconds=7),
        ContextLengthError("Too long.", param="messages"),
        engine_died(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_to_another_process_as_it_is(error: EngineError):
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), vars(again), str(again)) == (type(error), vars(error), str(error))


def test_a_missing_token_is_said_in_words(tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed (./scripts/setup --ray)")
    bare = {name: value for name, value in BARE.items() if not name.startswith("RAY_")}
    command = [BIN / "hearth", "cluster", "status", "--address", "127.0.0.1:9"]
    environment = bare | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "absent")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr
