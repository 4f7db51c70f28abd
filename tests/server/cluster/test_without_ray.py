"""What needs no cluster: one machine knows nothing of Ray, and what a cluster cannot be run with is refused in words."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_parts import CHAT, models_yaml
from serving import BIN, ROOT, free_port

from engine.errors import ContextLengthError, EngineError, OverloadedError, engine_died
from server.cluster import PORTS

BARE = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
_PORTS = (
    *("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen"),
    *("metrics-export", "min-worker", "max-worker"),
)


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
    environment = bare | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "absent")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [BIN / "hearth", "cluster", "status", "--address", f"127.0.0.1:{listener.getsockname()[1]}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_machine_is_not_started_with_what_it_cannot_use(tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed (./scripts/setup --ray)")
    settings = {
        "HEARTH_DATABASE_URL": "postgresql+psycopg://hearth:secret@db.example.org/hearth",
        "HEARTH_FILES_URL": tmp_path.as_uri(),
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }

    def up(*flags: str, **environment: str) -> str:
        command = [BIN / "hearth", "cluster", "up", *flags]
        done = subprocess.run(command, cwd=ROOT, env=BARE | environment, capture_output=True, text=True, check=False)
        assert (done.returncode != 0, done.stdout) == (True, "")
        return done.stderr

    assert "a cluster needs PostgreSQL" in up("--head")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        said = up("--head", f"--node-manager-port={taken}", **settings)
        assert f"Port {taken} cannot be used: Address already in use." in said
    ports = (f"--{name}-port={free_port()}" for name in _PORTS)
    own = {name: str(free_port()) for name in (*PORTS, "HEARTH_PORT")}
    assert "Nothing answers at 127.0.0.1:9." in up("--address=127.0.0.1:9", *ports, **own, **settings)
