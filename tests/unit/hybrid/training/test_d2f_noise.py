"""The noise of D2F: ratios that never fall, masks that follow them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid.errors import ConfigError
from hybrid.training.d2f.config import D2FConfig
from hybrid.training.d2f.recipe import noisy_batch, rising_ratios
from hybrid.training.data import Example

CONFIG = D2FConfig(data=Path("d"), output=Path("o"), block_size=4)
EXAMPLE = Example((5, 6, 7), tuple(range(10, 20)))


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_ratios_never_fall_and_stay_in_their_range() -> None:
    table = torch.stack([rising_ratios(6, 0.2, 0.7, draw(seed)) for seed in range(500)])
    assert (table.diff(dim=1) >= 0).all()
    assert table.min() >= 0.2
    assert table.max() <= 0.7
    # The first is uniform in the range: mean 0.45 with a deviation of 0.144 / sqrt(500).
    assert abs(float(table[:, 0].mean()) - 0.45) < 4 * 0.0065
    # A block adds on average half of what an even rise to the top would add.
    rise = ((0.7 - table[:, :1]) / 5).mean()
    assert float(table.diff(dim=1).mean()) == pytest.approx(float(rise) / 2, rel=0.1)


def test_a_lone_block_has_the_first_ratio() -> None:
    (ratio,) = rising_ratios(1, 0.3, 0.3, draw(0)).tolist()
    assert ratio == pytest.approx(0.3)


def test_noise_equals_a_two_loop_twin() -> None:
    for seed in range(20):
        batch = noisy_batch(EXAMPLE, CONFIG, 99, draw(seed))
        again = draw(seed)
        ratios = rising_ratios(3, 0.2, 0.7, again).tolist()  # ceil(10 / 4) blocks
        numbers = torch.rand(13, generator=again).tolist()
        for index, token in enumerate(EXAMPLE.tokens):
            block = 0 if index < 3 else 1 + (index - 3) // 4
            ratio = 0.0 if block == 0 else ratios[block - 1]
            hidden = numbers[index] < ratio
            assert batch.blocks[index] == block
            assert batch.mask_ratio[index] == pytest.approx(ratio)
            assert batch.masked[index] == hidden
            assert batch.input_ids[0, index] == (99 if hidden else token)


def test_there_is_always_something_to_learn() -> None:
    config = CONFIG.replace(mask_ratio_min=1e-9, mask_ratio_max=1e-9)
    found = {int(noisy_batch(EXAMPLE, config, 99, draw(s)).masked.nonzero()) for s in range(100)}
    assert found == set(range(3, 13))  # one token each time, any of the response


def test_ratios_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most mask_ratio_max"):
        D2FConfig(data=Path("d"), output=Path("o"), mask_ratio_min=0.8)
