"""The block rule by hand; its distribution is tests/property/test_verifiers_exact.py."""

from __future__ import annotations

import pytest
import torch

from hybrid.verifiers.block import accept_by_block

# The paper's example: target (1/3, 2/3), draft (2/3, 1/3) at every position, K = 2.
TARGET = torch.tensor([[1 / 3, 2 / 3]] * 3, dtype=torch.float64)
DRAFT = torch.tensor([[2 / 3, 1 / 3]] * 2, dtype=torch.float64)


def accept(tokens, uniforms):
    num_accepted, weights = accept_by_block(TARGET, DRAFT, tokens, uniforms)
    return num_accepted, (weights / weights.sum()).tolist()


def test_a_later_success_outweighs_an_earlier_failure():
    # AB: p_1 = 1/2, p_2 = min(1, 1/2 * 2) = 1, so the second test always passes.
    assert accept([0, 1], [0.999, 0.999]) == (2, pytest.approx([1 / 3, 2 / 3]))


def test_the_longest_passing_prefix_wins():
    # AA: p_1 = 1/2, p_2 = 1/4. After A the residual max(p_1 target - draft, 0) is (0, 0): h_1 = 0.
    assert accept([0, 0], [0.0, 0.249]) == (2, pytest.approx([1 / 3, 2 / 3]))
    assert accept([0, 0], [0.0, 0.251]) == (0, pytest.approx([0, 1]))


def test_the_next_token_comes_from_the_scaled_residual():
    # BA: p_1 = 1, h_1 = (1/3) / (1/3 + 0) = 1; p_2 = 1/2.
    assert accept([1, 0], [0.999, 0.501]) == (1, pytest.approx([0, 1]))
    assert accept([1, 0], [0.999, 0.499])[0] == 2


def test_a_token_the_target_excludes_ends_the_prefix():
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    for uniforms in ([0.0, 0.0], [0.999, 0.999]):
        num_accepted, weights = accept_by_block(target, DRAFT, [0, 1], uniforms)
        assert num_accepted == 0
        assert weights[0] == 0 < weights[1]


def test_no_draft_gives_the_target():
    num_accepted, weights = accept_by_block(TARGET[:1], None, [], [])
    assert (num_accepted, weights.tolist()) == (0, TARGET[0].tolist())
