"""Strategies by name, with parameters behind them, and grids."""

from __future__ import annotations

import pytest

from hybrid.errors import ConfigError
from hybrid.eval.grid import command_line, label_of, read_grid, read_strategies


def labels(*args, **kwargs) -> list[str]:
    return [label_of(strategy) for strategy in read_strategies(*args, **kwargs)]


def test_values_of_a_grid() -> None:
    assert read_grid(["threshold=0.7,0.8", "cache=none,dual", "block_size=4", "x=[1,2],[3]"]) == {
        "threshold": [0.7, 0.8],
        "cache": ["none", "dual"],
        "block_size": [4],
        "x": [[1, 2], [3]],
    }


@pytest.mark.parametrize("text", ["threshold", "=1", "threshold=", "cache=none,", "x=[]"])
def test_grids_that_say_nothing(text) -> None:
    with pytest.raises(ConfigError, match="--grid: got"):
        read_grid([text])
    with pytest.raises(ConfigError, match="threshold twice"):
        read_grid(["threshold=1", "threshold=2"])


def test_names_with_parameters() -> None:
    assert labels(["ar", "speculative block_size=4", "speculative", "ar"]) == [
        "ar",
        "speculative block_size=4",
        "speculative",
    ]
    assert labels([]) == []


def test_every_combination_of_a_grid() -> None:
    grid = ["threshold=0.7,0.9", "block_size=4,8"]
    assert labels(["fast-dllm"], ["cache=none"], grid) == [
        f"fast-dllm block_size={size} threshold={threshold} cache=none"
        for threshold in (0.7, 0.9)
        for size in (4, 8)
    ]


def test_the_flags_decode_the_same() -> None:
    (strategy,) = read_strategies(["fast-dllm cache=none threshold=0.7"])
    row = {"strategy": "fast-dllm", "parameters": {"threshold": 0.7, "cache": "none"}}
    assert command_line(row) == "--strategy fast-dllm --set threshold=0.7 --set cache=none"
    assert read_strategies(["fast-dllm"], ["threshold=0.7", "cache=none"]) == [strategy]


def test_all_refused_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"got 0, .*got -1, ") as error:
        read_strategies(["speculative"], grid=["block_size=0,4,-1"])
    assert "got 4" not in str(error.value)
    with pytest.raises(ConfigError, match=r"no parameter 'treshold'.*mean 'threshold'"):
        read_strategies(["speculative"], grid=["treshold=0.5"])
    with pytest.raises(ConfigError, match="mean 'speculative'"):
        read_strategies(["speculativ"])


@pytest.mark.parametrize(("settings", "grid"), [(["block_size=4"], []), ([], ["block_size=4"])])
@pytest.mark.parametrize("names", [[], ["ar", "speculative"]])
def test_parameters_belong_to_one_strategy(names, settings, grid) -> None:
    with pytest.raises(ConfigError, match=f"parameters for {len(names)} strategies, expected one"):
        read_strategies(names, settings, grid)
