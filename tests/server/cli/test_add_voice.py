"""`hearth voices add` as people call it: from a hub on this machine, with licences, cuts, wrong bytes and a full name."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Fault, HubServer
from serving import BIN
from small_models import VOICES_ONLY

from engine.demo import weights_dir

pytestmark = pytest.mark.engine  # many processes, each of which reads half of Hearth first

MMS, PIPER = "facebook/mms-tts-tir", "rhasspy/piper-voices"
AMY = "en/en_US/amy/medium/en_US-amy-medium.onnx"
PIPER_CONFIG = {"audio": {"sample_rate": 22050}, "espeak": {"voice": "en-us"}, "language": {"code": "en_US"}}


def mms_files() -> dict[str, bytes]:
    """The demo voice of Tigrinya, whose layout is that of MMS; it has no voices.yaml there."""
    folder = weights_dir("voices") / "demo-ti"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".yaml"}
    return files | {"README.md": b"---\nlicense: cc-by-nc-4.0\n---\n"}


def piper_files(licence: str) -> dict[str, bytes]:
    card = f"# Model card for amy\n\n* License: {licence}\n"
    files = {AMY: b"\x08\x08\x12\x07pytorch", f"{AMY}.json": json.dumps(PIPER_CONFIG).encode()}
    return files | {"en/en_US/amy/medium/MODEL_CARD": card.encode()}


class Desk:
    """The command line, on weights of its own and a hub of its own."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.weights, self.hub = folder / "weights", hub
        (folder / "models.yaml").write_text(VOICES_ONLY)
        left_out = {name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("HF_")}
        self.environment = {name: value for name, value in os.environ.items() if name not in left_out} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "HEARTH_WEIGHTS_DIR": str(self.weights),
            "HEARTH_DATA_DIR": str(folder / "data"),
            "HEARTH_MODELS": str(folder / "models.yaml"),
            "COLUMNS": "200",
        }

    def run(self, *arguments: str, code: int = 0, answer: str = "") -> str:
        command = [BIN / "hearth", "voices", *arguments]
        done = subprocess.run(
            command, env=self.environment, input=answer, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def voices(self) -> dict[str, dict[str, object]]:
        return {voice["id"]: voice for voice in json.loads(self.run("--json"))["voices"]}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with HubServer() as hub:
        hub.add(MMS, mms_files())
        hub.add(PIPER, piper_files("CC0"))
        yield Desk(tmp_path, hub)


def packages() -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_mtime_ns) for path in Path(sysconfig.get_path("purelib")).iterdir()}


def test_an_mms_voice_takes_its_place_once_its_licence_is_accepted(desk: Desk):
    before = packages()
    asked = desk.run("add", "mms:ti", "--gender", "male", "--id", "berhane", "--name", "Almaz", code=1, answer="n\n")
    assert "CC-BY-NC-4.0: no commercial use" in asked
    assert not desk.hub.paths
    assert not desk.weights.exists()
    told = desk.run("add", "mms:tir", "--gender", "male", "--id", "berhane", "--name", "Almaz", answer="y\n")
    assert "Almaz is there as berhane. Licence: CC-BY-NC-4.0." in told
    berhane = desk.voices()["berhane"]
    assert (berhane["name"], berhane["model"], berhane["quality"], berhane["available"]) == (
        "Almaz",
        "mms-ti",
        "neural",
        True,
    )
    assert len(desk.voices()) == 9
    desk.run("say", "berhane", "ሰላም", "-o", str(desk.weights / "said.wav"))
    assert (desk.weights / "said.wav").stat().st_size > 1000
    assert packages() == before


def test_a_fetch_that_was_cut_goes_on_and_wrong_bytes_are_refused(desk: Desk):
    desk.hub.repositories[MMS].served["model.safetensors"] = b"x" * len(
        desk.hub.repositories[MMS].files["model.safetensors"]
    )
    desk.run("add", "mms:ti", "--gender", "male", "--accept-licence", code=1)
    assert not (desk.weights / "voices" / "mms-ti").exists()
    desk.hub.repositories[MMS].served.clear()
    desk.hub.forget_counts()
    desk.hub.faults["model.safetensors"] = [Fault(cut=1000)]
    desk.run("add", "mms:ti", "--gender", "male", "--accept-licence")
    assert len(desk.hub.ranges["model.safetensors"]) == 2
    assert desk.voices()["mms-ti"]["gender"] == "male"


def test_a_piper_voice_says_its_own_licence_and_goes_where_it_is_refused(
    desk: Desk, tmp_path_factory: pytest.TempPathFactory
):
    told = desk.run("add", "piper:en_US-amy-medium", "--gender", "female")
    assert "Amy is there as piper-en_us-amy-medium. Licence: CC0." in told
    assert desk.voices()["piper-en_us-amy-medium"]["family"] == "piper"
    desk.hub.add(PIPER, piper_files("CC-BY-NC-SA 4.0"))
    other = Desk(tmp_path_factory.mktemp("other"), desk.hub)
    assert "no commercial use" in other.run("add", "piper:en_US-amy-medium", "--gender", "female", code=1, answer="n\n")
    assert not (other.weights / "voices" / "piper-en_us-amy-medium").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("piper:../../x",), "is no source of voices"),
        (("mms:ti", "--id", "No Good"), "--id has 1 to 64"),
    ],
)
def test_what_is_no_source_is_refused_before_anything_is_fetched(desk: Desk, arguments: tuple[str, ...], told: str):
    assert told in desk.run("add", *arguments, "--gender", "male", code=2)
    assert not desk.hub.paths


def test_an_id_that_another_folder_has_is_refused_before_anything_is_fetched(desk: Desk):
    desk.run("add", "mms:ti", "--gender", "male", "--accept-licence")
    desk.hub.forget_counts()
    told = desk.run("add", "piper:en_US-amy-medium", "--gender", "female", "--id", "mms-ti", code=2)
    assert "mms-ti has a voice mms-ti already" in told
    assert not desk.hub.paths
