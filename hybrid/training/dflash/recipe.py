"""The dflash recipe (arXiv:2602.06036): data, target and metrics around the drafter.

Next: hybrid/training/dflash/export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.errors import ConfigError
from hybrid.models.dflash import DFlashModel, DFlashSpec, spread_layers
from hybrid.models.loading import LoadedModel
from hybrid.models.transformer import NativeBackbone
from hybrid.training.config import TrainConfig
from hybrid.training.data import Example, data_sha256, split_examples
from hybrid.training.dflash.config import DFlashConfig
from hybrid.training.dflash.export import export_dflash
from hybrid.training.dflash.module import Blocks, DFlashTraining, start_from_target
from hybrid.training.loop import autocast
from hybrid.training.mask_token import Vocabulary, choose_mask_token
from hybrid.training.native import load_native
from hybrid.training.recipe import generator
from hybrid.types import Write

_ANCHOR_STRIDE = 8  # of the held-out evaluation


class DFlashRecipe:
    """See `Recipe`."""

    def __init__(
        self,
        config: DFlashConfig,
        module: DFlashTraining,
        train: list[Example],
        held_out: list[Example],
        sha256: str,
    ) -> None:
        """Keep the parts."""
        self.config, self.module, self.data_sha256 = config, module, sha256
        self.train, self.held_out = train, held_out

    def batch(self, step: int, index: int) -> Blocks:
        """Draw a sequence and its anchors, and run the target over it."""
        draw = generator(self.config.seed, step, index)
        example = self.train[int(torch.randint(len(self.train), (), generator=draw))]
        possible = _possible_anchors(example)
        chosen = torch.randperm(len(possible), generator=draw)[: self.config.anchors_per_sequence]
        return self._blocks(example, possible[chosen].sort().values)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Draft behind every eighth token of the held-out responses and compare.

        Returns:
            By position behind the anchor: "accuracy_by_position", the share of right tokens, and
            "acceptance_by_position", the share of drafts that are right up to there. And
            "expected_acceptance_length": 1 plus the mean number of leading right tokens.
        """
        spec = self.module.model.spec
        hits, leading, totals = torch.zeros(3, spec.block_size - 1)
        for example in self.held_out:
            blocks = self._blocks(example, _possible_anchors(example)[::_ANCHOR_STRIDE])
            with autocast(self.config, blocks.tokens.device):
                right, exists = right_drafts(self.module, blocks)
            hits += right.sum(dim=0).cpu()
            leading += right.long().cumprod(dim=1).sum(dim=0).cpu()
            totals += exists.sum(dim=0).cpu()
        totals = totals.clamp(min=1)
        return {
            "accuracy_by_position": _rounded(hits / totals),
            "acceptance_by_position": _rounded(leading / totals),
            "expected_acceptance_length": round(1 + float(leading.sum() / totals[0]), 4),
        }

    def export(self, folder: Path) -> Path:
        """Write the drafter and its card into `folder`/dflash."""
        # vLLM recognises the method by the folder's name.
        target = folder / "dflash"
        export_dflash(target, self.config, self.module.model, self.data_sha256)
        return target

    def _blocks(self, example: Example, anchors: Tensor) -> Blocks:
        backbone, ids = self.module.backbone, self.module.model.spec.target_layer_ids
        tokens = torch.tensor(example.tokens, device=backbone.device)
        length = len(tokens)
        out = backbone.forward(
            tokens[None],
            torch.arange(length, device=backbone.device)[None],
            causal([0], length),
            backbone.new_cache(1, length),
            [0],
            write=Write.COMMIT,
            num_logits=None if self.config.distillation else 0,
            taps=ids,
        )
        # Tensors made in inference mode cannot take part in autograd; their copies can.
        features = torch.cat([out.hidden[layer][0] for layer in ids], dim=-1).clone()
        logits = None if out.logits is None else out.logits[0].clone()
        return Blocks(tokens, features, anchors.to(backbone.device), logits)


def right_drafts(module: DFlashTraining, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return which drafted tokens [N, K] are the sequence's own, and which could be."""
    logits = module.logits(blocks)
    logits[..., module.model.spec.mask_token_id] = float("-inf")  # as the drafter does
    _, tokens, exists = blocks.targets(logits.shape[1])
    return (logits.argmax(dim=-1) == tokens) & exists, exists


def build(config: TrainConfig) -> DFlashRecipe:
    """Load the data and the target, and make a fresh drafter.

    Raises:
        ConfigError: bad data, or options that this target cannot have.
        CheckpointError: the target cannot be read.
    """
    assert isinstance(config, DFlashConfig)
    sha256 = data_sha256(config.data)  # before the model: it may have to be fetched
    loaded, backbone, examples = load_native(config)
    train, held_out = split_examples(examples, config.num_eval_sequences)
    spec = draft_spec(config, backbone, _mask_token(config, loaded, examples))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = DFlashModel(spec)
    if config.init == "target":
        start_from_target(model, backbone)
    model = model.to(backbone.device)
    module = DFlashTraining(model, backbone, config.decay, config.distillation)
    return DFlashRecipe(config, module, train, held_out, sha256)


def draft_spec(config: DFlashConfig, backbone: NativeBackbone, mask_token_id: int) -> DFlashSpec:
    """Return the drafter's shape: the target's, where the configuration does not say otherwise.

    Raises:
        ConfigError: heads that are no multiple of the key-value heads, or features that the target
            does not have, or of its last layer.
    """
    target, num_layers = backbone.spec, config.num_draft_layers
    ids = config.target_layer_ids
    heads = config.num_heads or target.num_heads
    groups = config.num_kv_heads or target.num_kv_heads
    if heads % groups:
        raise ConfigError(f"num_heads: got {heads}, expected a multiple of num_kv_heads, {groups}.")
    return DFlashSpec(
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=spread_layers(target.num_layers, num_layers) if ids is None else ids,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=config.head_dim or target.head_dim,
        norm_eps=target.norm_eps,
        max_seq_len=target.max_seq_len,
        rope=target.rope,
        windows=(None,) * num_layers,
        num_target_layers=target.num_layers,
    )


def _mask_token(config: DFlashConfig, loaded: LoadedModel, examples: list[Example]) -> int:
    used = {token for example in examples for token in example.tokens}
    backbone = loaded.backbone
    ids = Vocabulary(loaded.path, loaded.tokenizer, backbone.vocab_size, backbone.eos_token_ids)
    return choose_mask_token(ids, config.mask_token_id, used)


def _possible_anchors(example: Example) -> Tensor:
    """Return the response's positions but the last, which has nothing to predict."""
    return torch.arange(len(example.prompt), len(example.tokens) - 1)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
