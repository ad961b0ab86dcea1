"""From lm-eval's generation arguments, which speak transformers' language, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.strategy import OF_A_LAW


def sampling_params(
    gen_kwargs: Mapping[str, Any], max_gen_toks: int, special_ids: Mapping[str, int]
) -> SamplingParams:
    """Return what a request of lm-eval asks for.

    Args:
        gen_kwargs: `until`, `max_gen_toks` (or transformers' names for it), `do_sample`,
            `temperature`, and fields of `SamplingParams`.
        max_gen_toks: length limit of a request that names none.
        special_ids: id of each special token. A stop string that is one becomes a stop id: answers
            hold no text of special tokens.

    Raises:
        ConfigError: an argument that we do not have, or a value outside its range.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(dict(gen_kwargs), max_gen_toks))
    if given.pop("num_beams", 1) != 1:
        raise ConfigError("num_beams: got more than 1, expected 1. There is no beam search here.")
    # transformers' default is 1 where a request samples, and lm-eval's is not to sample.
    temperature = given.pop("temperature", 1.0) if given.pop("do_sample") else 0.0
    if not temperature:  # then tasks often set what has no meaning, such as top_p=0
        given = {name: value for name, value in given.items() if name not in OF_A_LAW}
    until = [text for text in (*given.pop("until"), *_several(given.pop("stop", ()))) if text]
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=given.pop("max_gen_toks"),
        stop=tuple(text for text in until if text not in special_ids),
        stop_token_ids=tuple(special_ids[text] for text in until if text in special_ids),
        **{name: value for name, value in given.items() if value is not None},
    )


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value
