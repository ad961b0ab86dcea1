"""The canvas: masked is a bitmap, not an id."""

import torch

from hybrid.decode.canvas import Canvas, rows_of

MASK = 9


def test_a_mask_id_in_the_prompt_is_a_token():
    canvas = Canvas([1, MASK, 3], 6, MASK)
    assert len(canvas) == 6
    assert canvas.tokens.tolist() == [1, MASK, 3, MASK, MASK, MASK]
    assert canvas.masked.tolist() == [False] * 3 + [True] * 3
    assert canvas.first_masked == 3
    assert canvas.num_masked(0, 6) == 3
    assert canvas.slots(0, 5).tolist() == [3, 4]


def test_commit_fills_slots_and_keeps_how_sure_it_was():
    canvas = Canvas([1], 4, MASK)
    canvas.commit(torch.tensor([3, 1]), torch.tensor([5, 6]), torch.tensor([0.5, 0.25]))
    assert canvas.tokens.tolist() == [1, 6, MASK, 5]
    assert canvas.first_masked == 2
    assert canvas.confidence.tolist() == [1.0, 0.25, 0.0, 0.5]
    canvas.commit(torch.tensor([2]), torch.tensor([7]))
    assert canvas.first_masked == len(canvas)


def test_rows_of_targets():
    targets = torch.tensor([4, 6, 7])
    assert rows_of(targets, 0, 0).tolist() == [4, 6, 7]
    assert rows_of(targets, 0, 1).tolist() == [3, 5, 6]
    assert rows_of(targets, 4, 0).tolist() == [0, 2, 3]
    # Its predecessor is not fed: the first token of the pass answers for itself.
    assert rows_of(targets, 4, 1).tolist() == [0, 1, 2]
