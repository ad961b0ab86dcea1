"""Config objects and environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid import config
from hybrid.config import Config
from hybrid.errors import ConfigError


class Sizes(Config):
    width: int = 1
    name: str = "x"


def test_unknown_keys_get_a_suggestion_or_the_choices():
    with pytest.raises(ConfigError, match="Sizes has no parameter 'widht'. Did you mean 'width'?"):
        Sizes(widht=3)
    with pytest.raises(ConfigError, match="no parameter 'zzz'. Choose from: name, width."):
        Sizes(zzz=3)


def test_values_are_checked():
    with pytest.raises(ConfigError, match="width: got 'a', expected a valid integer"):
        Sizes(width="a")
    with pytest.raises(ConfigError, match="name: got 3, expected a valid string"):
        Sizes().replace(name=3)


def test_a_config_error_is_a_value_error_without_a_pydantic_trace():
    with pytest.raises(ValueError, match="width") as caught:
        Sizes(width="a")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HYBRID_CACHE_DIR", "HYBRID_STATE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert config.cache_dir() == tmp_path / ".cache" / "hybrid-decoder"
    assert config.state_dir() == tmp_path / ".local" / "state" / "hybrid-decoder"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert config.cache_dir() == Path("/c/hybrid-decoder")
    assert config.state_dir() == Path("/s/hybrid-decoder")
    monkeypatch.setenv("HYBRID_CACHE_DIR", "~/mine")
    monkeypatch.setenv("HYBRID_STATE_DIR", "/here")
    assert config.cache_dir() == tmp_path / "mine"
    assert config.state_dir() == Path("/here")


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "HYBRID_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_offline(monkeypatch, name, value, expected):
    for each in ("HF_HUB_OFFLINE", "HYBRID_OFFLINE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert config.is_offline() is expected


def test_checks_are_on_in_the_tests(monkeypatch):
    assert config.checks_enabled()
    monkeypatch.setenv("HYBRID_CHECKS", "0")
    assert not config.checks_enabled()


def test_a_child_gets_the_environment_and_the_changes(monkeypatch):
    monkeypatch.setenv("SOMETHING", "old")
    child = config.subprocess_environment(SOMETHING="new", OTHER="1")
    assert (child["SOMETHING"], child["OTHER"]) == ("new", "1")
    assert "PATH" in child
