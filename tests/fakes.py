"""Stand-ins with known answers: a scripted target, drafters that are right or wrong on purpose, and
tiny random models behind the real backbone.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from fake_drafters import (
    FakeDrafter as FakeDrafter,
)
from fake_drafters import (
    GarbageDrafter as GarbageDrafter,
)
from fake_drafters import (
    Oracle as Oracle,
)
from fake_drafters import (
    RaisingDrafter as RaisingDrafter,
)
from fake_drafters import (
    SkewedDrafter as SkewedDrafter,
)
from fake_drafters import (
    UniformDrafter as UniformDrafter,
)
from fake_drafters import (
    always_right as always_right,
)
from fake_drafters import (
    always_wrong as always_wrong,
)
from fake_drafters import (
    sometimes_wrong as sometimes_wrong,
)
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.decode.step import Engine
from hybrid.decode.stopping import StopRule
from hybrid.decoder import HybridDecoder
from hybrid.drafters.dflash import DFlashDrafter
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.dflash import DFlashModel, DFlashSpec
from hybrid.models.draft_config import DraftConfig, base_shape, lora_prefix, projection_shapes
from hybrid.models.families import spec_from_config
from hybrid.models.tiny import byte_tokenizer, tiny_checkpoint
from hybrid.models.tokenizer import Tokenizer
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import PREFILL_CHUNK, ForwardOutput
from hybrid.registry import load
from hybrid.router.fixed import FixedRouter
from hybrid.streams import RandomStream
from hybrid.types import Context, SequenceState, Write

BYTES = Tokenizer(byte_tokenizer())
BYTE_VOCAB = BYTES.vocab_size
EOS = BYTES.eos_token_ids[0]

Next = Callable[[list[int]], Sequence[float]]


# Targets


class TokenCache:
    """A cache that holds token ids instead of keys and values."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.lengths = [0] * batch
        self.capacity = capacity

    def commit(self, row: int, num_tokens: int) -> None:
        assert self.lengths[row] + num_tokens <= len(self.tokens[row])
        self.lengths[row] += num_tokens

    def truncate(self, row: int, length: int) -> None:
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    def gather(self, row: int, keep: Sequence[int]) -> None:
        start = self.lengths[row]
        self.tokens[row][start:] = [self.tokens[row][start + k] for k in keep]
        self.lengths[row] += len(keep)

    def free(self, row: int) -> None:
        self.tokens[row], self.lengths[row] = [], 0


class FakeTarget:
    """A backbone whose logits are `law(tokens so far)`. It checks what the loop asks of it."""

    num_layers, hidden_size, mask_token_id, logit_shift = 1, 1, None, 0
    context, can_verify, block_size, default_strategy = Context.CAUSAL, True, None, "speculative"
    weight_nbytes, prefill_chunk = 0, PREFILL_CHUNK
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self,
        law: Next,
        vocab_size: int,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_seq_len: int = 4096,
        fail_at: dict[int, BaseException] | None = None,
    ) -> None:
        self.law, self.vocab_size = law, vocab_size
        self.eos_token_ids, self.max_seq_len = eos_token_ids, max_seq_len
        self.fail_at = fail_at or {}
        self.num_forwards = 0
        self.caches: list[TokenCache] = []

    def cache_nbytes(self, batch: int, max_len: int) -> int:
        return batch * max_len

    def new_cache(self, batch: int, max_len: int) -> TokenCache:
        self.caches.append(TokenCache(batch, max_len))
        return self.caches[-1]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        pattern: AttentionPattern,
        cache: TokenCache,
        rows: Sequence[int],
        *,
        write: Write = Write.SCRATCH,
        num_logits: int | None = None,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
        entry: Any = None,
        carried: Any = None,
    ) -> ForwardOutput:
        assert carried is None
        self.num_forwards += 1
        if self.num_forwards in self.fail_at:
            raise self.fail_at[self.num_forwards]
        num_tokens = input_ids.shape[1]
        assert pattern.is_causal
        assert entry is None
        assert logits_at is None
        assert ((input_ids >= 0) & (input_ids < self.vocab_size)).all()
        logits = torch.empty(len(rows), num_tokens, self.vocab_size)
        for b, row in enumerate(rows):
            start = cache.lengths[row]
            assert pattern.prefix_len[b] == start
            assert position_ids[b].tolist() == list(range(start, start + num_tokens))
            assert start + num_tokens <= cache.capacity
            cache.tokens[row][start:] = input_ids[b].tolist()
            for t in range(num_tokens):
                logits[b, t] = torch.tensor(self.law(cache.tokens[row][: start + t + 1]))
            if write == Write.COMMIT:
                cache.commit(row, num_tokens)
        hidden = {n: position_ids[..., None].float() for n in taps}
        return ForwardOutput(
            logits if num_logits is None else logits[:, logits.shape[1] - num_logits :], hidden
        )


class ScriptedTarget(FakeTarget):
    """Says `answer` after any prompt of `num_prompt_tokens` tokens, then repeats its last token."""

    def __init__(self, answer: Sequence[int], num_prompt_tokens: int, **kwargs: Any) -> None:
        self.answer = list(answer)

        def law(tokens: list[int]) -> list[float]:
            at = max(len(tokens) - num_prompt_tokens, 0)  # inside the prompt nobody looks
            logits = [0.0] * self.vocab_size
            logits[self.answer[min(at, len(self.answer) - 1)]] = 5.0
            return logits

        kwargs.setdefault("eos_token_ids", (EOS,))
        super().__init__(law, kwargs.pop("vocab_size", BYTE_VOCAB), **kwargs)


class RandomTarget(FakeTarget):
    """Logits drawn from a seed and the last three tokens: an n-gram model of a small vocabulary."""

    def __init__(self, vocab_size: int, seed: int = 0, scale: float = 1.5, **kwargs: Any) -> None:
        @cache
        def table(context: tuple[int, ...]) -> list[float]:
            draw = random.Random(hash((seed, context)))
            return [scale * draw.gauss(0, 1) for _ in range(vocab_size)]

        super().__init__(lambda tokens: table(tuple(tokens[-3:])), vocab_size, **kwargs)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
}


@cache
def tiny_backbone(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 64,
    device: str = "cpu",
    **fields: Any,
) -> NativeBackbone:
    """Return a random model without a tokenizer and without EOS."""
    kind, own = FAMILIES[family]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint(
            folder, kind, vocab_size=vocab_size, tokenizer=False, **{**own, **fields}
        )
        checkpoint = open_checkpoint(path)
        spec = spec_from_config(checkpoint.config)
        return NativeBackbone(spec, checkpoint.tensors, dtype=dtype, device=device)


def with_eos(backbone: NativeBackbone, *eos_token_ids: int) -> NativeBackbone:
    """Return a backbone that shares the weights and has other EOS ids."""
    twin: NativeBackbone = object.__new__(NativeBackbone)
    twin.__dict__.update(backbone.__dict__)
    twin.spec = replace(backbone.spec, eos_token_ids=eos_token_ids)
    twin.eos_token_ids = eos_token_ids
    return twin


def random_adapter(
    backbone: NativeBackbone, num_draft_tokens: int = 7, seed: int = 0, **fields: Any
) -> DiffusionAdapter:
    """Return an untrained diffusion adapter: its drafts are noise that a verifier must survive.

    `fields` are further ones of its configuration; by default it enters at layer 1.
    """
    spec, generator = backbone.spec, torch.Generator().manual_seed(seed)
    is_late = fields.get("entry_layer", 1) > 0
    own: dict[str, Any] = {
        "entry_layer": 1,
        "feature_layers": (0, spec.num_layers - 1) if is_late else (),
        **fields,
    }
    config = DraftConfig(num_draft_tokens, rank=2, lora_alpha=4, base=base_shape(backbone), **own)
    width, size = spec.hidden_size, config.sampler_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.train_norms:
        shapes["norm.weight"] = (width,)
    if is_late:
        shapes["slots"], shapes["mask"] = (num_draft_tokens + 1, width), (width,)
        shapes["project"] = (width, 2 * width)
        shapes["features"] = (width, len(config.feature_layers) * width)
    if size:
        shapes["sampler.gate_up"], shapes["sampler.down"] = (2 * size, 3 * width), (width, size)
    for index in range(config.entry_layer, spec.num_layers):
        if config.train_norms:
            shapes[f"layers.{index}.input_norm"] = shapes[f"layers.{index}.post_norm"] = (width,)
        for name, (inputs, outputs) in projection_shapes(spec).items():
            if name in config.targets:
                prefix = lora_prefix(index, name)
                shapes[f"{prefix}.lora_A.weight"] = (config.rank, inputs)
                shapes[f"{prefix}.lora_B.weight"] = (outputs, config.rank)
    tensors = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}
    return DiffusionAdapter(backbone, config, tensors)


def random_dflash(
    backbone: NativeBackbone, block_size: int = 8, seed: int = 0, **fields: Any
) -> DFlashDrafter:
    """Return an untrained DFlash drafter for a backbone of at least two layers."""
    spec = backbone.spec
    own: dict[str, Any] = {
        "mask_token_id": spec.vocab_size - 1,
        "target_layer_ids": (0, spec.num_layers - 2),
        "num_layers": 2,
        "windows": (None, None),
        **fields,
    }
    copied = {
        f.name: getattr(spec, f.name)
        for f in dataclasses.fields(DFlashSpec)
        if hasattr(spec, f.name)
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DFlashModel(DFlashSpec(**{**copied, "block_size": block_size, **own}))
    return DFlashDrafter(backbone, model)


# Putting it together


def decoder(backbone: Any, drafter: Any = "ngram", **kwargs: Any) -> HybridDecoder:
    """Return a decoder on token ids."""
    if drafter in {"self-diffusion", "combined"}:
        kwargs["adapter"] = random_adapter(backbone)
    if drafter == "dflash":
        drafter = random_dflash(backbone)
    return HybridDecoder(backbone, drafter=drafter, **kwargs)


def text_decoder(
    answer: str | Sequence[int], drafter: Any = "ngram", **kwargs: Any
) -> HybridDecoder:
    """Return a decoder of bytes whose target answers the prompt "?" with `answer`."""
    ids = BYTES.encode(answer) if isinstance(answer, str) else list(answer)
    target = ScriptedTarget([*ids, EOS], 1, **kwargs)
    return HybridDecoder(target, BYTES, drafter=drafter)


def make_engine(
    backbone: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    verifier: str = "rejection",
    num_draft_tokens: int = 4,
) -> tuple[Engine, list[SequenceState]]:
    """Return an engine and its rows, not yet prefilled, for tests below the facade."""
    states = [
        SequenceState(i, list(p), len(p), params, RandomStream(params.seed or 0))
        for i, p in enumerate(prompts)
    ]
    capacity = max(map(len, prompts)) + params.max_new_tokens + num_draft_tokens + 1
    engine = Engine(
        backbone,
        backbone.new_cache(len(states), capacity),
        drafter,
        load("verifier", verifier)(),
        FixedRouter(num_draft_tokens),
        rules={s.row: StopRule(params, backbone.eos_token_ids) for s in states},
    )
    return engine, states


def random_prompts(*lengths: int, vocab_size: int = 64, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(n)] for n in lengths]


def events_text(events: Iterator[Any]) -> tuple[str, Any]:
    """Consume a stream; return the joined text and the result."""
    text, result = "", None
    for event in events:
        assert result is None, "an event after the result"
        assert event.text == "".join(piece for piece, _ in event.pieces)
        text, result = text + event.text, event.result
    return text, result
