"""Names of recipes lead to what they promise; nothing is imported before."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from hybrid.errors import ConfigError
from hybrid.training import recipes
from hybrid.training.config import TrainConfig


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_has_its_configuration_and_a_build(name: str) -> None:
    assert issubclass(recipes.config_class(name), TrainConfig)
    assert recipes.config_class(name) is not TrainConfig
    assert callable(import_module(f"{recipes.RECIPES[name].package}.recipe").build)


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    message = "Unknown recipe 'self-difusion'. Did you mean 'self-diffusion'?"
    with pytest.raises(ConfigError, match=message):
        recipes.config_class("self-difusion")


def test_a_configuration_is_had_without_torch() -> None:
    code = (
        "import sys; from hybrid.training import recipes; recipes.config_class('self-diffusion');"
        "assert not {'torch', 'transformers', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
