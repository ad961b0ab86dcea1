"""Which transformers these tests run on: the oldest one that is supported, and the newest."""

from __future__ import annotations

import os
from importlib.metadata import requires

import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from transformers.cache_utils import DynamicSlidingWindowLayer

from hybrid.models import compat

OLDEST = "5.16"


def test_the_version_that_was_asked_for_runs() -> None:
    release = Version(transformers.__version__).release[:2]
    asked = os.environ.get("HYBRID_TEST_TRANSFORMERS")  # of the Makefile
    if asked is not None:
        assert release == Version(asked).release == Version(OLDEST).release
    else:
        assert release > Version(OLDEST).release, "the whole suite is for a newer one"


def test_what_is_tested_is_what_is_promised() -> None:
    mine = [Requirement(line) for line in requires("hybrid-decoder") or ()]
    (promised,) = (r.specifier for r in mine if r.name == "transformers")
    assert transformers.__version__ in promised
    assert f"{OLDEST}.0" in promised
    assert "5.15.9" not in promised


def test_names_of_the_cache() -> None:
    def new(ids: object, cache: object = None, past_key_values: object = None) -> None: ...
    def old(ids: object, past_key_values: object = None) -> None: ...
    def none(ids: object) -> None: ...

    names = [compat.cache_argument(function) for function in (new, old, none)]
    assert names == ["cache", "past_key_values", None]
    assert compat.given_cache({"past_key_values": 3, "cache": None}) == 3
    assert compat.given_cache({"ids": 3}) is None


def test_tokens_are_taken_back_from_the_end() -> None:
    cache = transformers.DynamicCache()
    compat.drop_last(cache, 0)
    keys = torch.arange(5.0).view(1, 1, 5, 1)
    cache.update(keys, keys, 0)
    compat.drop_last(cache, 2)
    assert cache.get_seq_length() == 3
    assert cache.layers[0].keys.flatten().tolist() == [0, 1, 2]
    assert compat.holds_positions(cache.layers[0])
    assert not compat.holds_positions(DynamicSlidingWindowLayer(sliding_window=4))
