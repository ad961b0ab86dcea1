"""The nouns: derived numbers, shape checks, JSON."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid.errors import ProposalError
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import GenerationResult, Proposal, SequenceState, Source, Stats


def test_a_row_derives_its_numbers_from_its_tokens():
    row = SequenceState(0, [4, 5, 6], 2, SamplingParams(), RandomStream(0))
    assert (row.anchor, row.cached_len, row.num_new_tokens) == (6, 2, 1)


TABLE = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("counts", [(3,), (1, 2, 3), (4, 0), (-1, 0)])
def test_counts_must_fit_the_table(counts):
    with pytest.raises(ProposalError, match="expected 2 numbers from 0 to 3"):
        Proposal(TABLE, counts)


@pytest.mark.parametrize("name", ["draft_probs", "entropy", "confidence"])
def test_the_other_tensors_must_fit_too(name):
    with pytest.raises(
        ProposalError, match=rf"{name}: got shape .* expected it to begin with \[2, 3\]"
    ):
        Proposal(TABLE, (3, 0), **{name: torch.zeros(2, 2, 5)})
    Proposal(TABLE, (3, 0), **{name: torch.zeros(2, 3, 5)})


def test_checks_can_be_switched_off(monkeypatch):
    monkeypatch.delenv("HYBRID_CHECKS")
    Proposal(TABLE, (9, 9))


def test_results_become_json():
    result = GenerationResult(
        "hi",
        (3, 4),
        "stop",
        (Source.AR, Source.BONUS),
        logprobs=(-0.5, -1.0),
        top_logprobs=({3: -0.5}, {}),
        stats=Stats(acceptance_histogram=(1, 2)),
    )
    data = json.loads(json.dumps(result.to_dict()))
    assert data["token_ids"] == [3, 4]
    assert data["sources"] == ["ar", "bonus"]
    assert data["top_logprobs"] == [{"3": -0.5}, {}]
    assert data["stats"]["acceptance_histogram"] == [1, 2]
    assert set(data["stats"]) == set(Stats.__slots__)
    assert json.loads(json.dumps(GenerationResult("", (), "length").to_dict()))["logprobs"] is None
