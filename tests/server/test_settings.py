"""Settings of the environment: unknown ones are refused, those that were removed are named."""

from __future__ import annotations

import pytest

from server.settings import SettingsError, load_settings, removed_names


def test_an_unknown_setting_is_refused_with_the_name_that_was_probably_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_PROT", "8001")
    with pytest.raises(SettingsError, match="HEARTH_PROT: there is no such setting; did you mean HEARTH_PORT"):
        load_settings()


def test_a_setting_that_was_removed_stops_nothing_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_API_PROCESSES", "2")
    load_settings()
    assert removed_names() == ["HEARTH_API_PROCESSES"]
