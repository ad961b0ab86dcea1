"""`DFlashAssistant` in transformers' own assisted generation, beside the drafter of our loop."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plug_models import random_network, tiny_model
from repository import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybrid.drafters.dflash import DFlashDrafter
from hybrid.errors import CheckpointError, ConfigError
from hybrid.export.layouts import save_speculators, save_transformers
from hybrid.models.dflash import DFlashModel
from hybrid.models.dflash_files import load_dflash
from hybrid.plug import DFlashAssistant, attach, detach
from hybrid.protocols import DraftState
from hybrid.types import Plan, Proposal

GOLDEN = ROOT / "tests" / "golden" / "dflash-fit"
NEW = 40


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """A model that a drafter was trained for, and that never ends."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def test_without_its_speculation_type_generate_says_what_to_add() -> None:
    model = tiny_model("llama")
    assistant = DFlashAssistant.wrap(random_network(model))
    assert not hasattr(assistant, "generation_config")
    with pytest.raises(AttributeError, match='Add speculation_type="dflash"'):
        model.generate(torch.tensor([[5, 9, 2]]), assistant_model=assistant, max_new_tokens=5)


class Steps:
    """A streamer that counts the tokens of each step of transformers' assisted generation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None: ...


def assisted(target: PreTrainedModel, assistant: Any, ids: Tensor) -> tuple[Tensor, list[int]]:
    """Return the output, and how many tokens each step with a draft committed."""
    steps, options = Steps(), {"max_new_tokens": NEW, "do_sample": False}
    out = target.generate(
        ids, assistant_model=assistant, speculation_type="dflash", streamer=steps, **options
    )
    sizes = steps.sizes[2:]  # behind the prompt, and the token of its pass
    done = itertools.accumulate(sizes, initial=1)
    # With room for one token nothing is drafted.
    return out, [size for size, before in zip(sizes, done, strict=False) if before < NEW - 1]


def test_transformers_accepts_what_our_loop_accepts(target: PreTrainedModel) -> None:
    assistant = DFlashAssistant.from_pretrained(GOLDEN / "drafter", target=target)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for length in (3, 9, 20):
        ids = torch.randint(60, (1, length), generator=generator)
        out, theirs = assisted(target, assistant, ids)
        plug = attach(target, drafter=assistant)
        assert torch.equal(target.generate(ids, max_new_tokens=NEW, do_sample=False), out)
        detach(target)
        lengths += theirs
        ours = list(plug.stats[0].acceptance_histogram)
        counted = [theirs.count(i + 1) for i in range(len(ours))]
        assert ours == counted
    assert len(set(lengths)) > 3, "a drafter that was trained is right now and then"


def test_drafts_are_ours_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of noise too, and with a window that hides most of the text from one layer."""
    model = tiny_model("qwen3")
    assistant = DFlashAssistant.wrap(random_network(model))
    assert assistant.network.spec.windows == (None, 6)
    theirs: dict[int, list[int]] = {}
    ours: dict[int, list[int]] = {}
    draft = DFlashDrafter.draft

    def hear(module: Any, args: Any, given: Any, out: Any) -> None:
        logits = model.lm_head(out.last_hidden_state[0, 1:])
        logits[:, assistant.config.mask_token_id] = -torch.inf
        anchor = int(given["position_ids"][0, -assistant.config.block_size])
        theirs[anchor] = logits.argmax(dim=-1).tolist()

    def spy(drafter: DFlashDrafter, state: DraftState, plan: Plan) -> Proposal:
        proposal = draft(drafter, state, plan)
        ours[state.rows[0].cached_len] = proposal.tokens[0].tolist()
        return proposal

    handle = assistant.register_forward_hook(hear, with_kwargs=True)
    ids = torch.randint(60, (1, 20), generator=torch.Generator().manual_seed(1))
    out, _ = assisted(model, assistant, ids)
    handle.remove()
    monkeypatch.setattr(DFlashDrafter, "draft", spy)
    attach(model, drafter=assistant)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), out)
    # Transformers also proposes the mask, which an untrained target may write: steps may differ.
    both = ours.keys() & theirs.keys()
    assert len(both) > NEW // 2
    assert [ours[i] for i in sorted(both)] == [theirs[i] for i in sorted(both)]
    assert len({tuple(tokens) for tokens in theirs.values()}) > 3


@pytest.mark.parametrize("layout", ["z-lab", "transformers", "speculators"])
def test_it_loads_what_others_write(layout: str, target: PreTrainedModel, tmp_path: Path) -> None:
    network = load_dflash(GOLDEN / "drafter")
    if layout == "z-lab":
        shutil.copytree(GOLDEN / "drafter", tmp_path, dirs_exist_ok=True)
    elif layout == "transformers":
        save_transformers(tmp_path, network, torch.float32)
    else:
        save_speculators(tmp_path, network, torch.float32, str(GOLDEN))
    assistant = DFlashAssistant.from_pretrained(tmp_path, target=target)
    ids = torch.tensor([[5, 9, 2, 40, 7]])
    expected = assisted(target, DFlashAssistant.wrap(network), ids)
    got = assisted(target, assistant, ids)
    assert torch.equal(got[0], expected[0])
    assert got[1] == expected[1]


def test_what_it_saves_comes_back(tmp_path: Path) -> None:
    network = random_network(tiny_model()).to(torch.bfloat16)
    DFlashAssistant.wrap(network).save_pretrained(tmp_path)
    loaded = DFlashAssistant.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.network.spec == network.spec
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], value)
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (5, 63)
    assert loaded.config.target_layer_ids == [0, 1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_any_family_is_a_target(family: str) -> None:
    model = tiny_model(family)
    ids = torch.tensor([[5, 9, 2, 40, 7, 8, 9]])
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    got, _ = assisted(model, DFlashAssistant.wrap(random_network(model)), ids)
    assert torch.equal(got[:, : want.shape[1]], want)


def test_padding_is_seen_by_nobody() -> None:
    model = tiny_model()
    assistant = DFlashAssistant.wrap(random_network(model))
    ids = torch.tensor([[5, 9, 2, 40, 7, 8, 9]])
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    seen: list[Tensor] = []
    assistant.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    options = {"assistant_model": assistant, "speculation_type": "dflash", "max_new_tokens": 9}
    model.generate(ids, do_sample=False, **options)
    num_calls = len(seen)
    mask = (padded != 0).long()
    model.generate(padded, attention_mask=mask, do_sample=False, **options)
    assert len(seen) == 2 * num_calls
    for alone, beside in zip(seen[:num_calls], seen[num_calls:], strict=True):
        torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


def test_the_draft_is_in_the_targets_dtype() -> None:
    model = tiny_model().to(torch.bfloat16)
    assistant = DFlashAssistant.wrap(random_network(model))  # float32
    out, _ = assisted(model, assistant, torch.tensor([[5, 9, 2]]))
    assert out.shape[1] == 3 + NEW


def test_the_wrong_drafter_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    network = random_network(model)
    DFlashAssistant.wrap(network).save_pretrained(tmp_path)
    small = tiny_model(vocab_size=60)
    with pytest.raises(CheckpointError, match="mask id 63"):
        DFlashAssistant.from_pretrained(tmp_path, target=small)
    with pytest.raises(ConfigError, match="target: got str"):
        DFlashAssistant.from_pretrained(tmp_path, target="org/model")
    with pytest.raises(ConfigError, match="expected 64 and 128"):
        DFlashAssistant.wrap(network)(torch.zeros(1, 5, 32), torch.zeros(1, 1, 64), torch.arange(6))
    with pytest.raises(ConfigError, match="no cache"):
        DFlashAssistant.wrap(network)(
            torch.zeros(1, 5, 64), torch.zeros(1, 1, 128), torch.arange(6)[None]
        )


def test_features_of_the_last_layer_are_refused(tmp_path: Path) -> None:
    """Transformers gives it normed, other engines do not."""
    spec = random_network(tiny_model()).spec
    late = replace(spec, num_target_layers=None, target_layer_ids=(2,))
    # This layout does not say how many layers the target has.
    save_transformers(tmp_path, DFlashModel(late), torch.float32)
    with pytest.raises(ConfigError, match="not the last one"):
        DFlashAssistant.from_pretrained(tmp_path, target=tiny_model())
