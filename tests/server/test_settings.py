"""Settings of the environment: unknown ones are refused."""

import re
from pathlib import Path

import pytest
from serving import ROOT

from server.settings import Settings, SettingsError, files_bucket, files_folder, load_settings


def test_an_unknown_setting_is_refused_with_the_name_that_was_probably_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_PROT", "8001")
    with pytest.raises(SettingsError, match="HEARTH_PROT: there is no such setting; did you mean HEARTH_PORT"):
        load_settings()


def _documented() -> dict[str, str]:
    """The default that docs/settings.md gives for each variable."""
    return dict(re.findall(r"^- `(HEARTH_\w+)` \(([^)]+)\)", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))


def test_the_documentation_names_every_setting_and_no_other():
    assert _documented().keys() == {f"HEARTH_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_documentation_names_the_default(name: str):
    default, said = Settings.model_fields[name].default, _documented()[f"HEARTH_{name.upper()}"]
    if isinstance(default, bool):
        assert said == str(default).lower()
    elif isinstance(default, (int, float)):
        assert said.partition(",")[0] == f"{default:.15g}"
    elif isinstance(default, (str, Path)):
        assert said == f"`{default}`"
    elif default == ():
        assert said == "none"
    else:  # made when it is needed, or none: told in words
        assert said


def test_a_shared_folder_of_files_needs_a_shared_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_FILES_URL", "file:///srv/hearth%20files")
    with pytest.raises(SettingsError, match="HEARTH_FILES_URL: needs HEARTH_DATABASE_URL"):
        load_settings()
    monkeypatch.setenv("HEARTH_DATABASE_URL", "postgresql+psycopg://user@host/name")
    assert files_folder(load_settings()) == Path("/srv/hearth files")
    assert files_bucket(load_settings()) is None
    monkeypatch.setenv("HEARTH_FILES_URL", "s3://hearth/office/files/")
    assert (files_folder(load_settings()), files_bucket(load_settings())) == (None, "s3://hearth/office/files")
    for wrong in ("s3://hearth/../other", "s3://who:what@hearth", "s3://", "/srv/files", "file://host/srv", "file:srv"):
        monkeypatch.setenv("HEARTH_FILES_URL", wrong)
        with pytest.raises(SettingsError, match="HEARTH_FILES_URL: must be a folder"):
            load_settings()
