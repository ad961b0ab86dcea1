"""Passes that overwrite cached K/V in place, and logits of chosen tokens."""

import pytest
import torch
from fakes import tiny_backbone

from hybrid.attention.pattern import bidirectional
from hybrid.errors import CapacityError
from hybrid.types import Write

LENGTH = 12


def full(backbone, tokens, cache, write=Write.SCRATCH, **kwargs):
    positions = torch.arange(LENGTH)[None]
    pattern = bidirectional([0], LENGTH)
    return backbone.forward(tokens[None], positions, pattern, cache, [0], write=write, **kwargs)


def refreshed(backbone, tokens, cache, positions, **kwargs):
    pattern = bidirectional([LENGTH], len(positions))
    return backbone.forward(
        tokens[positions][None],
        positions[None],
        pattern,
        cache,
        [0],
        write=Write.REFRESH,
        **kwargs,
    )


def case(num_layers):
    backbone = tiny_backbone(num_hidden_layers=num_layers)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (LENGTH,), generator=generator)
    cache = backbone.new_cache(1, LENGTH)
    full(backbone, tokens, cache, Write.COMMIT)
    return backbone, tokens, cache


@pytest.mark.parametrize("positions", [[4, 5, 6, 7], [9, 2, 5], list(range(LENGTH))])
def test_with_one_layer_a_refresh_equals_a_full_pass(positions):
    # A token's K/V in the first layer depend on itself alone, so nothing is stale.
    backbone, tokens, cache = case(num_layers=1)
    positions = torch.tensor(positions)
    tokens[positions] = (tokens[positions] + 7) % 64
    ours = refreshed(backbone, tokens, cache, positions).logits
    whole = backbone.new_cache(1, LENGTH)
    expected = full(backbone, tokens, whole, Write.COMMIT).logits
    torch.testing.assert_close(ours[0], expected[0, positions], rtol=0, atol=1e-5)
    assert cache.lengths == [LENGTH]
    torch.testing.assert_close(cache.data, whole.data, rtol=0, atol=1e-6)


def test_with_more_layers_the_others_stay_as_they_were():
    backbone, tokens, cache = case(num_layers=3)
    before = cache.data.clone()
    positions = torch.tensor([3, 4])
    tokens[positions] = (tokens[positions] + 7) % 64
    refreshed(backbone, tokens, cache, positions)
    others = [p for p in range(LENGTH) if p not in positions]
    assert torch.equal(cache.data[..., others, :], before[..., others, :])
    assert not torch.equal(cache.data[..., positions, :], before[..., positions, :])


def test_what_is_not_committed_cannot_be_refreshed():
    backbone, tokens, cache = case(num_layers=1)
    cache.truncate(0, 6)
    with pytest.raises(CapacityError, match="cannot refresh row 0 up to position 8, it holds 6"):
        refreshed(backbone, tokens, cache, torch.tensor([5, 7]))


def test_logits_of_chosen_tokens():
    backbone, tokens, cache = case(num_layers=2)
    cache.truncate(0, 0)
    at = torch.tensor([[7, 2, 2]])
    ours = full(backbone, tokens, cache, logits_at=at).logits
    every = full(backbone, tokens, cache).logits
    torch.testing.assert_close(ours, every[:, at[0]], rtol=0, atol=1e-5)
