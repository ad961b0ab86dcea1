"""The self-diffusion recipe: anchors of one sequence share one clean pass of the frozen target.

Next: hybrid/training/self_diffusion/loss.py, draft_model.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count as count_from_zero
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.models.draft_config import DraftConfig, base_shape, read_adapter
from hybrid.models.draft_input import MASKED, noise, reveal
from hybrid.models.linear import PACKED_ROWS
from hybrid.models.loading import LoadedModel
from hybrid.models.store import public_name
from hybrid.models.transformer import NativeBackbone
from hybrid.training.config import TrainConfig
from hybrid.training.data import Example, data_sha256, split_examples
from hybrid.training.mask_token import Vocabulary, choose_mask_token
from hybrid.training.native import load_native
from hybrid.training.recipe import generator
from hybrid.training.self_diffusion.card import write_card
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.context import TargetContext, target_context
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter
from hybrid.training.self_diffusion.loss import DraftBatch, DraftLoss, slot_targets

_ANCHORS_AT_ONCE = 64  # of an evaluation


class SelfDiffusionRecipe:
    """See `hybrid.training.recipe.Recipe`."""

    def __init__(
        self,
        config: SelfDiffusionConfig,
        module: DraftLoss,
        train: Sequence[Example],
        held_out: Sequence[Example],
        data_sha256: str,
    ) -> None:
        """Keep the parts."""
        self.config, self.module, self.data_sha256 = config, module, data_sha256
        self._train, self._held_out = train, held_out
        self._contexts: dict[int, TargetContext] = {}  # by index in `train`

    def batch(self, step: int, index: int) -> DraftBatch:
        """Draw the length of the drafts, a sequence and anchors in it."""
        config, draw = self.config, generator(self.config.seed, step, index)
        count = config.num_draft_tokens
        if torch.rand((), generator=draw) < config.short_share:
            count = min(count, config.short_draft_tokens)
        context = self._context(int(torch.randint(len(self._train), (), generator=draw)))
        anchors = draw_anchors(context, config.anchors_per_sequence, draw)
        shown = draw_shown(self.module.model.config, context, anchors, count, draw)
        return DraftBatch(context, anchors, count, shown)

    def evaluate(self) -> dict[str, Any]:
        """Return how well it drafts on the held-out sequences.

        A response is decoded as the engine would: a draft begins behind the token that the last
        one ended with. "expected_acceptance_length" is 1 plus the mean number of leading slots that
        equal the target's own tokens, "acceptance_by_position" the share of drafts that got so
        far. "accuracy_by_position" is the share of slots, behind any token of a response, that
        are right if those before them are.
        """
        reached, hits, totals = torch.zeros(3, self.config.num_draft_tokens)
        num_drafts = 0
        for example in self._held_out:
            right, exists = self._right_slots(example)
            hits += right.sum(dim=0)
            totals += exists.sum(dim=0)
            lengths = right.long().cumprod(dim=1).sum(dim=1).tolist()
            at = 0
            while at < len(lengths):
                reached[: lengths[at]] += 1
                num_drafts += 1
                at += lengths[at] + 1
        shares = reached / max(num_drafts, 1)
        return {
            "acceptance_by_position": [round(v, 4) for v in shares.tolist()],
            "accuracy_by_position": [round(v, 4) for v in (hits / totals.clamp(min=1)).tolist()],
            "expected_acceptance_length": round(1 + float(shares.sum()), 4),
        }

    def export(self, folder: Path) -> Path:
        """Write `adapter`, a PEFT folder with the draft's own tensors and its card."""
        model, tensors = self.module.model, self.module.model.adapter_tensors()
        if model.config.draft_vocab_size is not None:
            tensors["vocabulary"] = self.module.vocabulary.int()
        adapter = folder / "adapter"
        save_adapter(adapter, model.config, tensors, base_model=public_name(self.config.model))
        write_card(folder, self.config)
        return adapter

    def _context(self, index: int) -> TargetContext:
        """Return what the target knows of a training sequence."""
        if index in self._contexts:
            return self._contexts[index]
        model = self.module.model
        context = target_context(model.backbone, model.config, self._train[index])
        if self.config.keep_contexts:
            self._contexts[index] = context
        return context

    def _draft(self, context: TargetContext, anchors: Tensor) -> Tensor:
        """Return the tokens [N, K] that are drafted behind anchors, in as many passes as told.

        Among the tokens that decoding will choose among: all where the adapter has no vocabulary.
        """
        model, count = self.module.model, self.config.num_draft_tokens
        config, num_passes = model.config, min(self.config.num_passes, count)
        has_own = config.draft_vocab_size is not None
        head = self.module.head if has_own else model.head
        vocabulary = self.module.vocabulary if has_own else None
        known = anchors.new_full((len(anchors), count), MASKED)
        shown = known
        if config.corruption == "uniform":
            size = model.backbone.vocab_size
            drawn = [noise(0, anchor, count - 1, size) for anchor in anchors.tolist()]
            shown = torch.tensor(drawn, dtype=torch.long, device=anchors.device)
        for done in range(1, num_passes):
            logits = model(context, anchors, head, count, known)
            known = reveal(logits, vocabulary, known, count * done // num_passes)
            shown = known
        columns = model(context, anchors, head, count, shown).argmax(dim=-1)
        tokens = columns if vocabulary is None else vocabulary[columns]
        return torch.where(known == MASKED, tokens, known)

    def _right_slots(self, example: Example) -> tuple[Tensor, Tensor]:
        """Return which slots behind each response token are right, and which exist, [N, K]."""
        loss, count = self.module, self.config.num_draft_tokens
        context = target_context(loss.model.backbone, loss.model.config, example)
        rights, all_exist = [], []
        anchors = possible_anchors(context).to(context.tokens.device)
        for part in torch.split(anchors, _ANCHORS_AT_ONCE):
            targets, exists = slot_targets(context, part, count)
            rights.append((self._draft(context, part) == targets) & exists)
            all_exist.append(exists)
        return torch.cat(rights).cpu(), torch.cat(all_exist).cpu()


def build(config: TrainConfig) -> SelfDiffusionRecipe:
    """Load the data and the target, and make an adapter that changes nothing yet.

    Raises:
        ConfigError: bad data, or options that this target cannot have.
        CheckpointError: the target cannot be read.
    """
    assert isinstance(config, SelfDiffusionConfig)
    sha256 = data_sha256(config.data)  # before the model: it may have to be fetched
    loaded, backbone, examples = load_native(config)
    train, held_out = split_examples(examples, config.num_eval_sequences)
    if (config.draft_vocab_size or 0) > backbone.vocab_size:
        raise ConfigError(
            f"draft_vocab_size: got {config.draft_vocab_size}, expected at most "
            f"{backbone.vocab_size}, the model's own."
        )
    shape, vocabulary = _with_vocabulary(
        _draft_config(config, loaded, {t for e in examples for t in e.tokens}), train
    )
    start = None
    if config.init_from is not None:
        start = _read_start(config.init_from, shape)
        vocabulary = start.get("vocabulary", vocabulary).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = DraftModel(backbone, shape).to(backbone.device)
    if start is not None:
        model.load_adapter_tensors(start)
    module = DraftLoss(
        model,
        vocabulary.to(backbone.device),
        decay=config.decay,
        distillation=config.distillation,
    )
    return SelfDiffusionRecipe(config, module, train, held_out, sha256)


def _draft_config(
    config: SelfDiffusionConfig, loaded: LoadedModel, used: Collection[int]
) -> DraftConfig:
    backbone, mask_token = loaded.backbone, config.mask_token_id
    assert isinstance(backbone, NativeBackbone)
    entry_layer, feature_layers = config.layers(backbone.num_layers)
    if entry_layer == 0 and config.corruption == "mask":
        ids = Vocabulary(loaded.path, loaded.tokenizer, backbone.vocab_size, backbone.eos_token_ids)
        mask_token = choose_mask_token(ids, mask_token, used)
    return DraftConfig(
        num_draft_tokens=config.num_draft_tokens,
        entry_layer=entry_layer,
        feature_layers=feature_layers,
        rank=config.rank,
        lora_alpha=config.lora_alpha,
        base=base_shape(backbone),
        sampler_size=config.sampler_size,
        draft_vocab_size=config.draft_vocab_size,
        targets=config.targets,
        train_norms=config.train_norms,
        corruption=config.corruption,
        mask_token_id=mask_token,
        num_passes=config.num_passes,
        preferred_draft_tokens=config.preferred_draft_tokens,
        confidence_floor=config.confidence_floor,
    )


def _read_start(folder: Path, shape: DraftConfig) -> dict[str, Tensor]:
    """Return the tensors of an adapter of this shape; what it prefers may differ."""
    found, tensors = read_adapter(folder)
    prefers = {f: getattr(shape, f) for f in ("preferred_draft_tokens", "confidence_floor")}
    wanted, got = shape.to_dict(), replace(found, **prefers).to_dict()
    differs = ", ".join(
        f"{k} {got[k]!r} instead of {v!r}" for k, v in wanted.items() if got[k] != v
    )
    if differs:
        raise ConfigError(
            f"init_from: got {folder}, an adapter with {differs}. Expected one of the shape that "
            "is to be trained: set these fields to its values, or leave init_from out."
        )
    return tensors


def _with_vocabulary(shape: DraftConfig, examples: Sequence[Example]) -> tuple[DraftConfig, Tensor]:
    """Return the shape with the size of its draft vocabulary, and the ids [V'] that are trained.

    Decoding chooses among what was trained and measured, so an adapter keeps its vocabulary, unless
    that is the model's own. A plain one has no place for it: its decoding chooses among all tokens.
    """
    vocabulary = draft_vocabulary(examples, shape.draft_vocab_size)
    if shape.draft_vocab_size is not None or shape.is_plain:
        return shape, vocabulary
    whole = shape.base["vocab_size"]
    size = min(-(-len(vocabulary) // PACKED_ROWS) * PACKED_ROWS, whole)
    if size < whole:
        shape = replace(shape, draft_vocab_size=size)
    return shape, draft_vocabulary(examples, size)


def draft_vocabulary(examples: Sequence[Example], size: int | None) -> Tensor:
    """Return the ids of the `size` most frequent response tokens, ascending; None: of all.

    Where fewer occur, the lowest ids fill up.
    """
    counts = Counter(t for e in examples for t in e.response)
    ranked = [token for token, _ in counts.most_common(size)]
    missing = 0 if size is None else size - len(ranked)
    others = (t for t in count_from_zero() if t not in counts)
    return torch.tensor(sorted([*ranked, *islice(others, missing)]))


def possible_anchors(context: TargetContext) -> Tensor:
    """Return the positions of a response but the last, which has nothing to predict."""
    return torch.arange(context.first_anchor, len(context.tokens) - 1)


def draw_anchors(context: TargetContext, count: int, generator: torch.Generator) -> Tensor:
    """Return up to `count` distinct anchors, ascending."""
    possible = possible_anchors(context)
    chosen = torch.randperm(len(possible), generator=generator)[:count]
    return possible[chosen].sort().values.to(context.tokens.device)


def draw_shown(
    config: DraftConfig,
    context: TargetContext,
    anchors: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor | None:
    """Return what stands behind the anchors: random tokens, or some true ones among masks.

    With several passes, each anchor is shown as many true tokens as are known before one of them.

    Returns:
        [N, T - 1] ids or `MASKED`; None masks all.
    """
    num_anchors, device = len(anchors), anchors.device
    if config.corruption == "uniform":
        shape = (num_anchors, count - 1)
        return torch.randint(config.base["vocab_size"], shape, generator=generator).to(device)
    num_passes = min(config.num_passes, count)
    if num_passes == 1:
        return None
    done = torch.randint(num_passes, (num_anchors, 1), generator=generator)
    order = torch.rand(num_anchors, count, generator=generator).argsort(dim=1)
    targets, exists = slot_targets(context, anchors, count)
    is_shown = (order < count * done // num_passes).to(device) & exists
    return targets.masked_fill(~is_shown, MASKED)
