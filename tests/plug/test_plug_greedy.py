"""Greedy `generate` of a model with a plug: the model's own tokens, whatever drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_drafters import sometimes_wrong
from plug_models import (
    FAMILIES,
    NATIVE,
    prompts,
    random_network,
    save_random_adapter,
    texts,
    tiny_model,
)
from torch import Tensor
from transformers import LogitsProcessor

from hybrid.errors import ConfigError
from hybrid.models.transformer import NativeBackbone
from hybrid.plug import DFlashAssistant, Plug, attach, detach
from hybrid.plug.target import backbone_of
from hybrid.strategy import Strategy

NEW = 24


def oracle(inputs: dict[str, Tensor], answer: Tensor) -> Any:
    """Return a drafter that knows the answer, and is wrong at every third position."""
    return sometimes_wrong(texts(inputs, answer), 5)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, batch: int) -> None:
    model, inputs = tiny_model(family), prompts(batch)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    want = model.generate(**call)
    drafters = {
        "ngram": "ngram",
        "oracle": oracle(inputs, want),
        "dflash": DFlashAssistant.wrap(random_network(model)),
    }
    for name, drafter in drafters.items():
        plug = attach(model, drafter=drafter)
        assert (plug.why_not_native is None) == (family in NATIVE)
        assert torch.equal(model.generate(**call), want), name
        drafted = sum(row.num_drafted for row in plug.stats)
        accepted = sum(row.num_accepted for row in plug.stats)
        assert name == "ngram" or drafted > accepted, name
        assert name != "oracle" or accepted > NEW // 4
    attach(model, strategy="ar")
    assert torch.equal(model.generate(**call), want)


def test_a_token_that_a_drafter_takes_for_its_mask_is_still_a_token() -> None:
    model, inputs = tiny_model(), prompts(1)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    want = model.generate(**call)
    network = random_network(model, mask_token_id=int(want[0, -NEW // 2]))
    attach(model, drafter=network, strategy="dflash")
    assert torch.equal(model.generate(**call), want)


class Favour(LogitsProcessor):
    """Somebody's own: row b of a batch likes multiples of b + 2, and forbids what it saw last."""

    def __init__(self, batch: int) -> None:
        self.batch, self.num_calls = batch, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == self.batch
        self.num_calls += 1
        assert not (input_ids[:, -1] == input_ids[:, -2]).any(), "a text that it ruled out"
        scores = scores.scatter(1, input_ids[:, -1:], -torch.inf)
        for b in range(self.batch):
            scores[b, :: b + 2] += 2.0
        return scores


def only_even_rows(row: int, ids: Tensor) -> list[int]:
    """Allow each row another half of the vocabulary."""
    return list(range(32)) if row % 2 else list(range(20, 64))


PROCESSORS: dict[str, Callable[[int], dict[str, Any]]] = {
    "repetition": lambda batch: {"repetition_penalty": 3.0},
    "no repeats": lambda batch: {"no_repeat_ngram_size": 1},
    "shortest": lambda batch: {"min_new_tokens": 9, "eos_token_id": list(range(1, 40))},
    "bad words": lambda batch: {"bad_words_ids": [*([i] for i in range(3, 64, 5)), [4, 9]]},
    "prefix": lambda batch: {"prefix_allowed_tokens_fn": only_even_rows},
    "forced end": lambda batch: {"forced_eos_token_id": 1},
    "encoder": lambda batch: {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "own": lambda batch: {"logits_processor": [Favour(batch)]},
    "many": lambda batch: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
        "logits_processor": [Favour(batch)],
        "bad_words_ids": [[8, 9]],
    },
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_act_at_every_position_of_a_pass(name: str, batch: int) -> None:
    model, inputs = tiny_model(), prompts(batch)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    plain = model.generate(**call)
    want = model.generate(**call, **PROCESSORS[name](batch))
    assert not torch.equal(plain[:, : want.shape[1]], want), "this processor does nothing"
    plug = attach(model, drafter=oracle(inputs, want))
    options = PROCESSORS[name](batch)
    assert torch.equal(model.generate(**call, **options), want)
    assert sum(row.num_accepted for row in plug.stats) > 0
    own = [p for p in options.get("logits_processor", ()) if isinstance(p, Favour)]
    num_new = sum(row.num_new_tokens for row in plug.stats)
    assert [p.num_calls for p in own] == [num_new] * len(own)


# Self-diffusion


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["self-diffusion", "combined", None])
def test_a_model_drafts_for_itself(name: str | None, batch: int, tmp_path: Path) -> None:
    model, inputs = tiny_model(), prompts(batch)
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.1}
    want = model.generate(**inputs, **options)
    plug = attach(model, drafter=name, adapter=save_random_adapter(tmp_path))
    assert torch.equal(model.generate(**inputs, **options), want)
    assert all(row.num_draft_forwards > 5 for row in plug.stats)
    for strategy in (Strategy.preset("speculative", mode="one-pass"), "hybrid"):
        attach(model, drafter=name, adapter=tmp_path, strategy=strategy)
        assert torch.equal(model.generate(**inputs, **options), want)


def test_self_diffusion_needs_a_model_that_the_native_backbone_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type 'gpt2'"):
        attach(tiny_model("gpt2"), adapter=tmp_path)


# The model itself


def test_detach_leaves_nothing() -> None:
    model = tiny_model()
    before = dict(vars(model))
    pointers = [weight.data_ptr() for weight in model.parameters()]
    plug = attach(model, drafter="ngram")
    assert isinstance(plug, Plug)
    model.generate(**prompts(1), max_new_tokens=3, do_sample=False)
    detach(model)
    assert vars(model) == before
    assert [weight.data_ptr() for weight in model.parameters()] == pointers


def test_the_native_backbone_computes_with_the_models_tensors() -> None:
    model = tiny_model("qwen3")
    backbone, reason = backbone_of(model)
    assert reason is None
    assert isinstance(backbone, NativeBackbone)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    linears = [x for layer in backbone.layers for x in (layer.o, layer.down, backbone.head)]
    parts = [p for layer in backbone.layers for x in (layer.qkv, layer.gate_up) for p in x.parts]
    tensors = [backbone.embedding, backbone.norm, *(x.weight for x in [*linears, *parts])]
    tensors += [getattr(y, n) for y in backbone.layers for n in ("input_norm", "k_norm")]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= own
