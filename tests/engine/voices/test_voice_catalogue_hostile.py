"""Whatever a model folder holds costs that model or that voice alone, with a warning, and delays nothing."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from voice_folders import (
    GOOD,
    OTHER,
    complaint_of,
    ids,
    kokoro,
    overlay,
    piper,
    put,
    read,
    vits,
)

from engine import LoadError
from engine.voices.catalogue import read_catalogue

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nvoices: [*b, *b]\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A good model, `good`, beside which a bad one is put."""
    overlay(vits(tmp_path / "voices", "good"), GOOD)
    return tmp_path / "voices"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"model_type": "vi', "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b'{"model_type": "\xff"}', "cannot be read as JSON"),
        (b'{"num_speakers": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'{"model_type": "vits"}' + b" " * 10 * 2**20, "is larger than 1024 KiB"),
        (b'{"model_type": ["vits"]}', "not a TTS model that Hearth knows"),
        (b'{"model_type": "vits", "num_speakers": "3"}', "`num_speakers` must be a whole number"),
        (b'{"model_type": "vits", "num_speakers": true}', "`num_speakers` must be a whole number"),
        (b'{"model_type": "vits", "num_speakers": 1e400}', "`num_speakers` must be a whole number"),
        (b'{"model_type": "vits", "num_speakers": -1}', "`num_speakers` must be a whole number"),
        (b'{"model_type": "vits", "auto_map": {"AutoModel": "evil.Model"}}', "run code of its own"),
    ],
)
def test_a_bad_config_hides_its_model(root: Path, content: bytes, complaint: str):
    put(overlay(vits(root, "bad"), OTHER), "config.json", content)
    assert complaint in complaint_of(root)


@pytest.mark.parametrize(
    "config",
    [
        {"audio": [], "espeak": 3, "language": "so", "num_speakers": 1},
        {"audio": {"sample_rate": "loud"}, "language": {"code": ["so"]}},
        {"num_speakers": 3, "speaker_id_map": ["a"]},
        {"num_speakers": 3, "speaker_id_map": {"a": "0", "b": True, "c": 1.0, "d": 9, "e\x1b": 1, "\ud800": 2}},
    ],
)
def test_wrong_types_in_a_piper_config_count_as_nothing_said(root: Path, config: dict[str, object]):
    plain = {"language": {}, "espeak": {}}
    piper(root, "bad", **plain | config)
    assert "nothing says" in complaint_of(root)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (BOMB, "the alias `*a` is not allowed"),
        ("voices: !!python/object/apply:os.system ['true']\n", "has the YAML tag"),
        ("voices:\n- " + "[" * 5000, "nested more than 16 levels"),
        ("- a\n", "must begin with a key"),
        ("", "is empty"),
        ("voices: 3\n", "voices: must be a list"),
        ("voices: {a: 1}\n", "voices: must be a list"),
        ("voices: [" + "{}, " * 1001 + "]", "lists 1001 voices"),
        ("voices: [" + "{x: 1}, " * 1001 + "]", "lists 1001 voices"),
        ("voice: []\n", "unknown key; did you mean `voices`?"),
        ("license: x\n", "unknown key; did you mean `licence`?"),
        ("demo: maybe\n", "demo: must be true or false"),
        ("language: Amharic\n", "must be the code of a language"),
        ("licence: [a]\n", "licence: must be text"),
        ('licence: "a\\u202eb"\n', "invisible character"),
        ('licence: "\\ud800"\n', "invalid Unicode character escape"),
        ("voices: []\nvoices: []\n", "appears twice"),
        (b"licence: \xff\n", "is not UTF-8 text"),
        (b"licence: a\x1bb\n", "invisible character"),
        (b"# " + b"x" * 200_000, "is larger than 128 KiB"),
        (b"# " + b"x" * 10 * 2**20, "is larger than 128 KiB"),
    ],
)
def test_a_bad_overlay_hides_its_model(root: Path, content: str | bytes, complaint: str):
    put(vits(root, "bad"), "voices.yaml", content)
    assert complaint in complaint_of(root)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"id": "../x"}, "must be 1 to 64 of a-z"),
        ({"id": "a/b"}, "must be 1 to 64 of a-z"),
        ({"id": "a\nb"}, "must be 1 to 64 of a-z"),
        ({"id": "selam\n"}, "must be 1 to 64 of a-z"),
        ({"id": "Selam"}, "must be 1 to 64 of a-z"),
        ({"id": "\u202eabc"}, "must be 1 to 64 of a-z"),
        ({"id": "ሰላም"}, "must be 1 to 64 of a-z"),
        ({"id": ""}, "must be 1 to 64 of a-z"),
        ({"id": "-a"}, "must be 1 to 64 of a-z"),
        ({"id": "a" * 65}, "must be 1 to 64 of a-z"),
        ({"id": "a" * 50_000}, "must be 1 to 64 of a-z"),
        ({"id": 3}, "must be 1 to 64 of a-z"),
        ({"name": "a\u202eb"}, "invisible character"),
        ({"name": "a\x00b"}, "invisible character"),
        ({"name": " \n"}, "is empty"),
        ({"name": "a" * 65}, "must be text of 1 to 64 characters"),
        ({"gender": "woman"}, "must be one of `female`, `male`, or null"),
        ({"gender": ["female"]}, "must be one of `female`, `male`, or null"),
        ({"gendre": "female"}, "unknown key; did you mean `gender`?"),
        ({"language": "xx"}, "must be the code of a language"),
        ({"speaker": 1.5}, "must be the number or the name"),
        ({"speaker": [0]}, "must be the number or the name"),
        ({"speaker": True}, "must be the number or the name"),
        ({"description": "x" * 301}, "must be text of 1 to 300 characters"),
    ],
)
def test_a_bad_entry_hides_its_voice_and_not_the_others_of_the_model(
    root: Path, entry: dict[str, object], complaint: str
):
    overlay(vits(root, "bad", speakers=2), OTHER | {"speaker": 0} | entry, OTHER | {"speaker": 1, "id": "hana"})
    assert complaint in complaint_of(root, voices=["selam", "hana"])


def test_an_entry_that_is_no_mapping_hides_nothing_else(root: Path):
    put(vits(root, "bad"), "voices.yaml", "voices:\n- 3\n- {id: abebe, name: Abebe, gender: male}\n")
    assert "voices[0]: must be a mapping" in complaint_of(root, voices=["selam", "abebe"])


def test_a_text_over_several_lines_is_one_line(root: Path):
    text = "voices:\n- id: abebe\n  name: Abebe\n  gender: male\n  description: >\n    One\n    two.\n"
    put(vits(root, "more"), "voices.yaml", text)
    assert {voice.description for voice in read(root).voices} >= {"One two."}


def test_thousands_of_mistakes_are_a_few_warnings(root: Path):
    entries = ({f"key{number}": 1, "speaker": number} for number in range(900))
    overlay(vits(root, "bad", speakers=1000), *entries)
    catalogue = read(root)
    assert ids(catalogue) == ["selam"]
    assert len(catalogue.warnings) == 21
    assert "more mistakes" in catalogue.warnings[-1].message or "more warnings" in catalogue.warnings[-1].message


@pytest.mark.parametrize("text", [BOMB, "language: !!x am\n", "a: b: c\n", "- a\n", "\x00\n", "language: [am\n"])
def test_a_bad_model_card_is_left_out(root: Path, text: str):
    put(root / "good", "README.md", f"---\n{text}---\n")
    assert "README.md, front matter: " in complaint_of(root)


def test_a_bad_model_card_that_lists_voices_hides_its_model(root: Path):
    put(vits(root, "bad"), "README.md", f"---\nservice_voices:\n  voices: []\n{BOMB}---\n")
    assert "bad is hidden: README.md, front matter: " in complaint_of(root)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        "model_type",
        "num_speakers",
        "sampling_rate",
        "language",
        "license",
        "speaker_id_map",
        "audio",
        "espeak",
        "voices",
        "licence",
        "demo",
        "service_voices",
        "consent",
        "istftnet",
        "auto_map",
        "code",
        "voice",
    ]
)
ENTRY_KEYS = st.sampled_from(["speaker", "id", "name", "gender", "language", "description", "licence", "consent", "x"])
WORDS = st.sampled_from(["vits", "amh", "so", "female", "male", "af_heart", "a", 0, 1, 2]) | VALUES
ENTRIES = st.dictionaries(ENTRY_KEYS, WORDS, max_size=6) | VALUES
JSON = st.dictionaries(KEYS, WORDS | st.lists(ENTRIES, max_size=3), max_size=6)
CONTENTS = (
    st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    | VALUES.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: b"---\n" + json.dumps({"service_voices": value}).encode() + b"\n---\n")
)
FILES = st.dictionaries(
    st.sampled_from(
        [
            "config.json",
            "tokenizer_config.json",
            "voices.yaml",
            "README.md",
            "MODEL_CARD",
            "a-b-c.onnx.json",
            "a-b-c.onnx",
            "vocab.json",
            "model.safetensors",
            "voices/af_heart.safetensors",
            "voices/xx.pt",
            "kokoro.pth",
        ]
    ),
    CONTENTS,
    max_size=5,
)
FAMILIES = st.sampled_from([vits, piper, kokoro])


@settings(max_examples=60)
@given(family=FAMILIES, files=FILES, more=FILES)
def test_arbitrary_files_raise_nothing_but_the_documented_error(family, files, more):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        overlay(vits(root, "good"), GOOD)
        family(root, "one")
        for folder, contents in (("one", files), ("two", more)):
            for file, content in contents.items():
                put(root / folder, file, content)
        try:
            catalogue = read(root)
        except LoadError as error:
            assert "Two voices have the id" in error.message  # noqa: PT017 - both outcomes are right
            return
        assert catalogue.find("selam") is not None
        for voice in catalogue.voices:
            texts = (voice.name, voice.description, voice.licence or "", voice.consent or "", voice.id)
            assert all(text.isprintable() for text in texts)
            json.dumps(voice.id).encode()


@settings(max_examples=40)
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_arbitrary_bytes_in_any_one_file_raise_nothing(content: bytes):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number, file in enumerate(["config.json", "tokenizer_config.json", "voices.yaml", "README.md"]):
            put(overlay(vits(root, f"m{number}"), GOOD | {"id": f"v{number}"}), file, content)
        put(root / "m3", "README.md", b"---\n" + content + b"\n---\n")
        put(piper(root, "p"), "so_SO-hodan-medium.onnx.json", content)
        assert read_catalogue(root).find("v3") is not None
