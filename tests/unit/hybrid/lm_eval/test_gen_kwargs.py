"""What lm-eval's generation arguments become."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid.errors import ConfigError
from hybrid.lm_eval.gen_kwargs import sampling_params
from hybrid.params import SamplingParams


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"max_new_tokens": 40}),
        ({"max_gen_toks": 7}, {"max_new_tokens": 7}),
        ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"until": ["\n", "", "Q:"]}, {"max_new_tokens": 40, "stop": ("\n", "Q:")}),
        ({"until": "\n", "stop": "Q:"}, {"max_new_tokens": 40, "stop": ("\n", "Q:")}),
        (
            {"until": ["<eos>", "\n"]},
            {"max_new_tokens": 40, "stop": ("\n",), "stop_token_ids": (2,)},
        ),
        # Greedy: what only changes a law has no meaning, even if we would refuse its value.
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.0}, {"max_new_tokens": 40}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5}, {"max_new_tokens": 40}),
        ({"temperature": 0.0}, {"max_new_tokens": 40}),
        # Sampling: transformers' default temperature is 1.
        ({"do_sample": True}, {"max_new_tokens": 40, "temperature": 1.0}),
        ({"temperature": 0.6}, {"max_new_tokens": 40, "temperature": 0.6}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "num_beams": 1},
            {"max_new_tokens": 40, "temperature": 0.6, "top_p": 0.9},
        ),
        ({"repetition_penalty": 1.2}, {"max_new_tokens": 40, "repetition_penalty": 1.2}),
    ],
    ids=str,
)
def test_arguments(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    before = str(given)
    assert sampling_params(given, 40, {"<eos>": 2}) == SamplingParams(**wanted)
    assert str(given) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "num_beams: got more than 1"),
        ({"top_q": 0.5}, "no parameter 'top_q'.*Did you mean 'top_"),
        ({"do_sample": True, "temperature": -1.0}, "temperature: got -1.0"),
    ],
    ids=str,
)
def test_what_we_do_not_have_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling_params(given, 40, {})
