"""A cluster of Ray on this machine, for tests: nodes to add and to take away, and Hearth on it, over PostgreSQL."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import httpx2
import postgres_parts
import yaml
from serving import BIN, NO_COMPILER, ROOT, Key, free_port, poll_until

from server.cluster import PORTS, environment

HOST = Path(__file__).with_name("cluster_host.py")
CHAT, IMAGES, SPEECH = "service-plus", "service-image", "service-voice"
DEPLOY_SECONDS = 420


def missing_reason() -> str | None:
    """Why there can be no cluster here, or None."""
    if find_spec("ray") is None:
        return "Ray is not installed (./scripts/setup --ray)"
    return postgres_parts.missing_reason()


def models_yaml(path: Path, roles: Mapping[str, Any], *, tiers: Mapping[str, Any] | None = None) -> Path:
    """Write the models of these roles, as they are shipped."""
    shipped = yaml.safe_load((ROOT / "models.yaml").read_text())
    names = [name for role in roles.values() for name in role["models"]]
    content = {
        "models": {name: shipped["models"][name] for name in names},
        "tiers": {**shipped["tiers"], **(tiers or {})},
        "cluster": {"roles": dict(roles)},
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


class RayCluster:
    """A head without replicas and nodes `a` and `b`, each with a proxy of its own. Use as `with`."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self._haproxy = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))  # its sockets' paths have to be short
        self.ports = {name: free_port() for name in ("head", "a", "b", "c")}
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HEARTH_", "RAY_"))},
            **NO_COMPILER,
            "OMP_NUM_THREADS": "1",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            **environment(self._haproxy),
            **_own_ports(),
            "RAY_AUTH_MODE": "disabled",
            "HEARTH_DATABASE_URL": database_url,
            "HEARTH_FILES_URL": (folder / "files").as_uri(),
            "HEARTH_DATA_DIR": str(folder / "data"),
            "HEARTH_WEIGHTS_DIR": str(folder / "weights"),
            "HEARTH_PORT": str(self.ports["head"]),
            "HEARTH_DRAIN_SECONDS": "20",
        }
        (folder / "weights").mkdir(parents=True, exist_ok=True)
        (folder / "files").mkdir()
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with (self.folder / "ray.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=self.environment,
            )
        self.address = self._answer()["address"]
        for name in ("a", "b"):
            self.add(name)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self._haproxy)

    def add(self, name: str) -> None:
        """Add a node; its proxy has the port `ports[name]`."""
        self._ask("add", name, {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.ports[name]), **_own_ports()})

    def remove(self, name: str) -> None:
        """Kill a node with everything that runs on it."""
        self._ask("remove", name)

    def hearth(self, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run the command line with the settings of the cluster."""
        return subprocess.run(
            [BIN / "hearth", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def deploy(self, models: Path) -> None:
        """Serve what the file says, and wait until it is healthy."""
        arguments = ("--models", str(models), "--address", self.address)
        done = self.hearth("cluster", "deploy", *arguments, seconds=DEPLOY_SECONDS)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def status(self) -> dict[str, Any]:
        done = self.hearth("cluster", "status", "--address", self.address, "--json")
        assert done.returncode in {0, 2}, done.stderr
        return dict(json.loads(done.stdout))

    def make_key(self, name: str = "test", *options: str) -> Key:
        done = self.hearth("keys", "create", "--name", name, "--tier", "enhanced", "--json", *options)
        assert done.returncode == 0, done.stderr
        return Key(json.loads(done.stdout)["key"])

    def replica_urls(self) -> list[str]:
        """Return where the replicas that speak HTTP listen themselves: HAProxy has a key stay with one of them."""
        urls = (one["status"]["base_url"] for one in self.status()["replicas"])
        return [url.removesuffix("/v1") for url in urls if url is not None]

    def root_url(self, node: str = "head") -> str:
        return f"http://127.0.0.1:{self.ports[node]}"

    def wait_until_ready(self, node: str = "head", seconds: float = 240) -> None:
        def ready() -> bool:
            with suppress(httpx2.HTTPError):
                return httpx2.get(f"{self.root_url(node)}/health/ready", timeout=10).status_code == 200
            return False

        poll_until(ready, seconds, describe=lambda: (self.folder / "ray.log").read_text()[-3000:])

    def _ask(self, *command: Any) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError(f"The cluster has ended:\n{(self.folder / 'ray.log').read_text()[-3000:]}")


def _own_ports() -> dict[str, str]:
    """Return those that are one machine's, of which there are several here."""
    return {name: str(free_port()) for name in PORTS if "DIRECT_INGRESS" not in name}
