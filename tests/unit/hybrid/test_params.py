"""SamplingParams: what it accepts, what it refuses, and how it says so."""

from __future__ import annotations

import math

import pytest

from hybrid.errors import ConfigError
from hybrid.params import SamplingParams


def test_the_default_is_greedy_and_256_tokens():
    params = SamplingParams()
    assert params.is_greedy
    assert not params.has_penalties
    assert params.max_new_tokens == 256
    assert params.logprobs is None


BAD = [
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", "hot", "valid number"),
    ("top_k", -1, "greater than or equal to 0"),
    ("top_k", 1.5, "integer"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.01, "less than or equal to 1"),
    ("top_p", math.nan, "than"),
    ("min_p", -0.5, "greater than or equal to 0"),
    ("min_p", 1.5, "less than or equal to 1"),
    ("min_p", math.nan, "than"),
    ("repetition_penalty", 0, "greater than 0"),
    ("repetition_penalty", math.inf, "finite"),
    ("presence_penalty", math.nan, "finite"),
    ("frequency_penalty", -math.inf, "finite"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**63, "less than"),
    ("max_new_tokens", 0, "greater than or equal to 1"),
    ("max_new_tokens", -3, "greater than or equal to 1"),
    ("max_new_tokens", 2.5, "integer"),
    ("max_new_tokens", None, "integer"),
    ("min_new_tokens", -1, "greater than or equal to 0"),
    ("stop", 5, "tuple"),
    ("stop", [""], "at least one character"),
    ("stop", ["a", 3], "string"),
    ("stop_token_ids", [-1], "greater than or equal to 0"),
    ("stop_token_ids", 5, "tuple"),
    ("ignore_eos", "perhaps", "boolean"),
    ("logprobs", -1, "greater than or equal to 0"),
    ("logprobs", 101, "less than or equal to 100"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD, ids=lambda v: str(v)[:20])
def test_bad_values_are_refused_by_name(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert expected in message
    assert "got" in message
    with pytest.raises(ConfigError):
        SamplingParams().replace(**{name: value})


def test_all_errors_are_told_at_once():
    with pytest.raises(ConfigError, match=r"temperature: .*top_p: "):
        SamplingParams(temperature=-1, top_p=0)


@pytest.mark.parametrize(
    ("wrong", "right"), [("temprature", "temperature"), ("max_tokens", "max_new_tokens")]
)
def test_unknown_keywords_get_a_suggestion(wrong, right):
    for make in (SamplingParams, SamplingParams().replace):
        with pytest.raises(ConfigError, match=f"no parameter '{wrong}'. Did you mean '{right}'?"):
            make(**{wrong: 1})


def test_a_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_replace_keeps_the_rest_and_the_original():
    params = SamplingParams(temperature=0.5, stop="x")
    changed = params.replace(top_k=3)
    assert (changed.temperature, changed.stop, changed.top_k) == (0.5, ("x",), 3)
    assert params.top_k == 0


def test_it_is_frozen():
    with pytest.raises((ConfigError, ValueError), match="frozen"):
        SamplingParams().temperature = 1.0


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_are_noticed(name):
    assert SamplingParams(**{name: -0.1}).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
