"""Names, entry points, and errors that say what exists."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from hybrid import registry
from hybrid.errors import ConfigError


@pytest.mark.parametrize("kind", ["drafter", "verifier"])
def test_every_name_loads_and_is_its_own_name(kind):
    for name in registry.names(kind):
        assert registry.load(kind, name).name == name


def test_unknown_names_get_a_suggestion():
    with pytest.raises(ConfigError, match="Unknown drafter 'ngrm'. Did you mean 'ngram'?"):
        registry.load("drafter", "ngrm")
    with pytest.raises(
        ConfigError, match="Unknown verifier 'zzz'. Choose from: block, greedy, rejection"
    ):
        registry.load("verifier", "zzz")


def plug_in(monkeypatch, *values):
    points = [EntryPoint(name, value, "hybrid.drafters") for name, value in values]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_other_packages_add_names_and_cannot_take_ours(monkeypatch):
    plug_in(monkeypatch, ("mine", "collections:OrderedDict"), ("ngram", "collections:Counter"))
    assert registry.names("drafter")["mine"] == "collections:OrderedDict"
    assert registry.load("drafter", "mine").__name__ == "OrderedDict"
    assert registry.load("drafter", "ngram").__name__ == "NgramDrafter"


@pytest.mark.parametrize("value", ["no_such_module_here:X", "collections:NoSuchThing"])
def test_a_broken_plug_in_is_named(monkeypatch, value):
    plug_in(monkeypatch, ("mine", value))
    with pytest.raises(ConfigError, match=rf"drafter 'mine' \({value}\) cannot be loaded"):
        registry.load("drafter", "mine")
