"""`hearth voices add` as people call it: from a hub on this machine, with licences, cuts, wrong bytes and a full disk."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_server import Fault, HubServer
from small_disks import small_disk
from small_models import VOICES_ONLY
from tiny_kokoro import kokoro_files, pickled
from tiny_omnivoice import omnivoice_files

from engine.demo import weights_dir
from server.cli.voices import source_of

pytestmark = pytest.mark.engine  # its process reads half of Hearth first

MMS, PIPER, KOKORO = "facebook/mms-tts-tir", "rhasspy/piper-voices", "hexgrad/Kokoro-82M"
OMNIVOICE = "k2-fsa/OmniVoice"
AMY = "en/en_US/amy/medium/en_US-amy-medium.onnx"
PIPER_CONFIG = {"audio": {"sample_rate": 22050}, "espeak": {"voice": "en-us"}, "language": {"code": "en_US"}}
ADD_MMS = ("add", "mms:ti", "--gender", "male")
ADD_AMY = ("add", "piper:en_US-amy-medium", "--gender", "female")
ADD_OMNIVOICE = ("add", "omnivoice", "--accept-licence")
ROOM = "64m"


def mms_files() -> dict[str, bytes]:
    """The demo voice of Tigrinya, whose layout is that of MMS; it has no voices.yaml there."""
    folder = weights_dir("voices") / "demo-ti"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".yaml"}
    return files | {"README.md": b"---\nlicense: cc-by-nc-4.0\n---\n"}


def piper_files(licence: str) -> dict[str, bytes]:
    card = f"# Model card for amy\n\n* License: {licence}\n"
    files = {AMY: b"\x08\x08\x12\x07pytorch", f"{AMY}.json": json.dumps(PIPER_CONFIG).encode()}
    return files | {"en/en_US/amy/medium/MODEL_CARD": card.encode()}


class Loop:
    """A process that runs one command line after the other, with one hub."""

    def __init__(self, folder: Path, hub: HubServer) -> None:
        self.hub = hub
        (folder / "models.yaml").write_text(VOICES_ONLY)
        left_out = {name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("HF_")}
        environment = {name: value for name, value in os.environ.items() if name not in left_out} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "HEARTH_DATA_DIR": str(folder / "data"),
            "HEARTH_MODELS": str(folder / "models.yaml"),
            "COLUMNS": "200",
        }
        command = [sys.executable, str(Path(__file__).with_name("cli_loop.py"))]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **asked: object) -> tuple[int, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        return done["code"], done["said"]


@dataclass
class Desk:
    """The command line, on weights of its own."""

    weights: Path
    loop: Loop

    @property
    def hub(self) -> HubServer:
        return self.loop.hub

    def run(self, *arguments: str, command: str = "voices", code: int = 0, answer: str = "") -> str:
        environment = {"HEARTH_WEIGHTS_DIR": str(self.weights)}
        found, said = self.loop.run(arguments=[command, *arguments], answer=answer, environment=environment)
        assert found == code, said
        return said

    def voices(self) -> dict[str, dict[str, Any]]:
        found, _ = json.JSONDecoder().raw_decode(self.run("--json"))
        return {voice["id"]: voice for voice in found["voices"]}


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with HubServer() as hub:
        hub.add(MMS, mms_files())
        pinned = source_of("kokoro").revision
        assert pinned is not None
        hub.add(KOKORO, kokoro_files("af_heart", "bm_george"), commit=pinned)
        hub.add(OMNIVOICE, omnivoice_files())
        made = Loop(tmp_path_factory.mktemp("loop"), hub)
        yield made
        made.process.kill()
        made.process.communicate()


@pytest.fixture
def desk(tmp_path: Path, loop: Loop) -> Desk:
    hub = loop.hub
    hub.add(PIPER, piper_files("CC0"))
    hub.forget_counts()
    return Desk(tmp_path / "weights", loop)


def packages() -> str:
    """A hash of everything that is installed: paths, sizes and times of all files."""
    content = hashlib.sha256()
    for folder, folders, files in os.walk(sysconfig.get_path("purelib")):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            found = os.lstat(f"{folder}/{name}")
            content.update(f"{folder}/{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return content.hexdigest()


def test_an_mms_voice_takes_its_place_once_its_licence_is_accepted(desk: Desk):
    asked = desk.run(*ADD_MMS, "--id", "berhane", "--name", "Almaz", code=1, answer="n\n")
    assert "CC-BY-NC-4.0: no commercial use" in asked
    assert "--accept-licence accepts it" in desk.run(*ADD_MMS, code=1)  # with nobody to ask
    assert not desk.hub.paths
    assert not desk.weights.exists()
    told = desk.run(*ADD_MMS, "--id", "berhane", "--name", "Almaz", answer="y\n")
    assert "Almaz is installed as berhane. Licence: CC-BY-NC-4.0." in told
    berhane = desk.voices()["berhane"]
    assert (berhane["name"], berhane["model"], berhane["quality"]) == ("Almaz", "mms-ti", "neural")
    assert berhane["available"]
    assert len(desk.voices()) == 9
    told = desk.run(*ADD_AMY, "--id", "berhane", code=2)
    assert "mms-ti has a voice berhane already" in told


@pytest.mark.parametrize(
    ("arguments", "large", "voice"),
    [
        ((*ADD_MMS, "--accept-licence"), (MMS, "model.safetensors"), "mms-ti"),
        (ADD_AMY, (PIPER, AMY), "piper-en_us-amy-medium"),
        (("add", "kokoro"), (KOKORO, "kokoro-v1_0.pth"), "kokoro-af-heart"),
        (ADD_OMNIVOICE, (OMNIVOICE, "audio_tokenizer/model.safetensors"), "omnivoice-am-female"),
    ],
)
def test_a_cut_fetch_goes_on_wrong_bytes_are_refused_and_the_voice_travels(
    desk: Desk, tmp_path: Path, arguments: tuple[str, ...], large: tuple[str, str], voice: str
):
    repository, file = large
    before, source = packages(), desk.hub.repositories[repository]
    source.served[file] = b"x" * len(source.files[file])
    assert "its SHA-256 was wrong both times" in desk.run(*arguments, code=1)
    assert not list(desk.weights.glob("voices/*"))
    source.served.clear()
    desk.hub.forget_counts()
    desk.hub.faults[file] = [Fault(cut=len(source.files[file]) // 2)]
    desk.run(*arguments)
    assert len(desk.hub.ranges[file]) == 2
    found = desk.voices()[voice]
    assert found["quality"] == "neural"
    (folder,) = desk.weights.glob("voices/*")
    assert not [path for path in folder.rglob("*") if path.suffix in {".pth", ".pt"}]
    desk.run("export", "--to", str(tmp_path / "disk"), command="weights")
    other = Desk(tmp_path / "other", desk.loop)
    desk.hub.forget_counts()
    other.run("import", str(tmp_path / "disk"), command="weights")
    other.run(*arguments)  # writes voices.yaml, where the files do not say everything
    assert not desk.hub.paths
    assert other.voices()[voice] == found
    assert packages() == before


@pytest.mark.rounds
def test_kokoro_speaks_what_was_converted(desk: Desk):
    told = desk.run("add", "kokoro")
    assert "2 voices are installed: kokoro-af-heart, kokoro-bm-george. Licence: apache-2.0." in told
    heart, george = (desk.voices()[f"kokoro-{name}"] for name in ("af-heart", "bm-george"))
    assert (heart["gender"], heart["language"], heart["family"], heart["available"]) == ("female", "en", "kokoro", True)
    assert (george["gender"], george["name"]) == ("male", "George")
    desk.run("say", "kokoro-af-heart", "Hello, world.", "-o", str(desk.weights / "said.wav"))
    assert (desk.weights / "said.wav").stat().st_size > 10_000


def test_omnivoice_is_ten_voices_once_its_licence_is_accepted(desk: Desk):
    assert "CC-BY-NC-4.0: no commercial use" in desk.run("add", "omnivoice", code=1, answer="n\n")
    assert not desk.hub.paths
    told = desk.run("add", "omnivoice", answer="y\n")
    assert "10 voices are installed: omnivoice-am-female, omnivoice-am-male, omnivoice-so-female" in told
    assert "Licence: CC-BY-NC-4.0" in told
    voices = {name: voice for name, voice in desk.voices().items() if voice["family"] == "omnivoice"}
    assert {(voice["language"], voice["gender"]) for voice in voices.values()} == {
        (language, gender) for language in ("am", "so", "ti", "om", "en") for gender in ("female", "male")
    }
    assert all(voice["available"] for voice in voices.values())
    assert (desk.weights / "voices" / "omnivoice" / "audio_tokenizer" / "LICENSE").exists()


def test_pickles_that_hold_code_are_refused_unread(desk: Desk, tmp_path: Path):
    class Harmful:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "was here"),)

    files = kokoro_files("af_heart")
    pinned = desk.hub.repositories[KOKORO].commit
    kept = desk.hub.repositories[KOKORO]
    desk.hub.add(KOKORO, files | {"voices/af_heart.pt": pickled(Harmful())}, commit=pinned)
    told = desk.run("add", "kokoro", code=1)
    desk.hub.repositories[KOKORO] = kept
    assert "voices/af_heart.pt has more than tensors, so it could run code, and is refused" in told
    assert not (tmp_path / "was here").exists()
    assert not (desk.weights / "voices").exists()


def test_a_piper_voice_that_says_no_commerce_goes_where_that_is_refused(desk: Desk):
    desk.hub.add(PIPER, piper_files("CC-BY-NC-SA 4.0"))
    assert "no commercial use" in desk.run(*ADD_AMY, code=1, answer="n\n")
    assert not (desk.weights / "voices" / "piper-en_us-amy-medium").exists()


@pytest.mark.parametrize("arguments", [(*ADD_MMS, "--accept-licence"), ADD_AMY, ("add", "kokoro"), ADD_OMNIVOICE])
def test_a_full_disk_is_said_before_anything_large_is_fetched(desk: Desk, arguments: tuple[str, ...]):
    desk.weights.mkdir()
    with small_disk(desk.weights, ROOM):
        assert "Not enough room on the disk" in desk.run(*arguments, code=1)
        assert not (desk.weights / "voices").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("piper:../../x", "--gender", "male"), "is not a source of voices"),
        (("mms:ti", "--gender", "male", "--id", "No Good"), "--id has 1 to 64"),
        (("mms:ti",), "Give --gender female or --gender male"),
        (("kokoro", "--gender", "female"), "have names of their own"),
        (("omnivoice", "--gender", "female"), "have names of their own"),
    ],
)
def test_what_is_no_source_is_refused_before_anything_is_fetched(desk: Desk, arguments: tuple[str, ...], told: str):
    assert told in desk.run("add", *arguments, code=2)
    assert not desk.hub.paths
