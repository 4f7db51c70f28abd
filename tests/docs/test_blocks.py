"""Every code block of the documentation is of a kind that is checked, here or by a test that is named here.

Of the shell's: what the shell reads, with programs, scripts and variables that there are. test_docs.py parses each
`hearth` line, and runs those of curl and Python; those of other clients run in tests/contract/test_clients.py.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import jinja2
import pytest
import yaml
from serving import ROOT
from small_models import models_yaml
from test_docs import PAGES

from engine.config import load_config
from server.settings import Settings

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE), id=f"{page.name}-{number}-{language}")
    for page in PAGES
    for number, (indent, language, text) in enumerate(FENCED.findall(page.read_text()), 1)
]
SCRIPT = re.compile(r"(?<![\w./])(?:\./)?(scripts/[\w/.-]+)")
VARIABLE = re.compile(r"\bHEARTH_[A-Z_]+\b")
# Of clients and scripts, and the address and key of the command line.
OTHER_VARIABLES = {"HEARTH_URL", "HEARTH_KEY", "HEARTH_MODEL"}
MODEL = "  {name}: {{task: chat, tier: standard, capabilities: [chat], weights: {name}}}\n"


def of(*languages: str) -> list[object]:
    return [block for block in BLOCKS if block.values[0] in languages]


def test_no_block_is_of_a_kind_that_is_not_checked():
    # "" is what a program prints, or a file's lines: tests/engine/voices/test_voice_catalogue.py has those of voices.
    known = {"sh", "bash", "console", "python", "yaml", "toml", "json", "js", "jinja", ""}
    assert {block.values[0] for block in BLOCKS} == known


@pytest.mark.parametrize(("language", "text"), of("sh", "bash", "console"))
def test_the_shell_reads_it_and_what_it_names_is_there(language: str, text: str):
    if language == "console":
        text = "\n".join(re.findall(r"^\$ (.*)", text, re.MULTILINE))
    text = re.sub(r"<[\w ]+>", "placeholder", text)
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    for script in SCRIPT.findall(text):
        assert (ROOT / script).is_file(), f"there is no {script}"
    settings = {f"HEARTH_{name.upper()}" for name in Settings.model_fields}
    assert set(VARIABLE.findall(text)) - settings <= OTHER_VARIABLES


@pytest.mark.parametrize(("language", "text"), of("yaml", "toml", "json", "jinja"))
def test_a_file_is_read(language: str, text: str, tmp_path: Path):
    if language == "toml":
        assert tomllib.loads(text)
    elif language == "jinja":
        said = jinja2.Template(text).render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert said.strip() == "<|user|>\nHi<|end|>\n<|assistant|>"
    elif not text.startswith("# yaml-language-server"):  # a comment for editors
        assert any(yaml.safe_load_all(text))


@pytest.mark.parametrize(("_language", "text"), [block for block in of("yaml") if "task:" in block.values[1]])
def test_models_of_an_example_can_be_served(_language: str, text: str, tmp_path: Path):
    found = yaml.safe_load(text)
    bases = [model["base"] for model in found.get("models", found).values() if "base" in model]
    entries = text.removeprefix("models:\n") if "models" in found else re.sub("^(?=.)", "  ", text, flags=re.MULTILINE)
    file = tmp_path / "models.yaml"
    more = [MODEL.format(name=base) for base in bases]
    file.write_text(text if "tiers" in found else models_yaml(entries, *more))
    assert load_config(file).models


@pytest.mark.parametrize(("_language", "text"), [block for block in of("yaml") if "roles:" in block.values[1]])
def test_roles_of_an_example_can_be_served(_language: str, text: str, tmp_path: Path):
    named = {name for role in yaml.safe_load(text)["cluster"]["roles"].values() for name in role["models"]}
    file = tmp_path / "models.yaml"
    file.write_text(models_yaml(*(MODEL.format(name=name) for name in named)) + text)
    assert load_config(file).roles
