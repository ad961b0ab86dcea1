"""What every backbone promises (hybrid/protocols.py), checked on the native and the HF one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid.attention.pattern import causal, padded
from hybrid.errors import CapacityError
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.families import spec_from_config
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import Backbone, Cache, ForwardOutput
from hybrid.types import Write

WINDOW = 6
GEMMA = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
# name: (backbone, family, config fields). Sequences below are longer than the windows.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "native-llama": ("native", "llama", {}),
    "native-qwen3": ("native", "qwen3", {"tie_word_embeddings": True}),
    "native-mistral-window": ("native", "mistral", {"sliding_window": WINDOW}),
    "hf-llama": ("hf", "llama", {}),
    "hf-mistral-window": ("hf", "mistral", {"sliding_window": WINDOW}),
    "hf-gpt2": ("hf", "gpt2", {}),
    "hf-gpt_neo-local": (
        "hf",
        "gpt_neo",
        {"attention_types": [[["global", "local", "local"], 1]], "window_size": WINDOW},
    ),
    "hf-gemma3-window": ("hf", "gemma3_text", GEMMA),
    "hf-bloom-no-positions": ("hf", "bloom", {}),
}
TOKENS = torch.randint(0, 64, (4, 40), generator=torch.Generator().manual_seed(3))
CLOSE = {"rtol": 0.0, "atol": 1e-4}


@dataclass
class Case:
    """A backbone and transformers' own model of the same checkpoint."""

    backbone: Backbone
    reference: Any

    def forward(
        self, cache: Cache, tokens: Tensor, rows: Sequence[int] = (0,), **kwargs: Any
    ) -> ForwardOutput:
        """A causal pass that continues `rows`; tokens [B, T] or [T]."""
        tokens = tokens if tokens.ndim == 2 else tokens[None]
        starts = [cache.lengths[row] for row in rows]
        positions = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
        pattern = causal(starts, tokens.shape[1])
        return self.backbone.forward(tokens, positions, pattern, cache, rows, **kwargs)

    def logits(
        self, cache: Cache, tokens: Tensor, rows: Sequence[int] = (0,), **kwargs: Any
    ) -> Tensor:
        logits = self.forward(cache, tokens, rows, **kwargs).logits
        assert logits is not None
        return logits

    @torch.no_grad()
    def expected(self, tokens: Tensor) -> Tensor:
        """Logits [T, V] of transformers without any cache."""
        logits: Tensor = self.reference(tokens[None], use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, family, fields = CASES[request.param]
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"), family, tokenizer=False, **fields)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    if kind == "hf":
        return Case(HFBackbone.from_path(path, "cpu", torch.float32), reference)
    checkpoint = open_checkpoint(path)
    backbone = NativeBackbone(spec_from_config(checkpoint.config), checkpoint.tensors)
    return Case(backbone, reference)


def test_it_describes_itself(case: Case) -> None:
    backbone = case.backbone
    assert (backbone.vocab_size, backbone.hidden_size, backbone.num_layers) == (64, 64, 3)
    assert backbone.max_seq_len >= 512
    assert backbone.eos_token_ids == ()
    assert backbone.logit_shift == 1
    assert backbone.device == torch.device("cpu")
    assert backbone.dtype == torch.float32


def test_a_prefill_equals_transformers(case: Case) -> None:
    cache = case.backbone.new_cache(1, 40)
    logits = case.logits(cache, TOKENS[0], write=Write.COMMIT)
    assert cache.lengths == [40]
    torch.testing.assert_close(logits[0], case.expected(TOKENS[0]), **CLOSE)


def test_speculative_steps_leave_what_a_fresh_prefill_leaves(case: Case) -> None:
    """Passes whose last tokens are rejected, of several widths, well past the windows."""
    cache, want = case.backbone.new_cache(1, 64), case.expected(TOKENS[0])
    case.forward(cache, TOKENS[0, :9], write=Write.COMMIT)
    wrong, done = TOKENS[1], 9
    for width, accepted in ((1, 1), (5, 2), (4, 4), (7, 1), (3, 1), (8, 3), (2, 2), (6, 6)):
        right = TOKENS[0, done : done + accepted]
        draft = torch.cat([right, wrong[: width - accepted]])
        logits = case.logits(cache, draft)
        torch.testing.assert_close(logits[0, :accepted], want[done : done + accepted], **CLOSE)
        assert cache.lengths == [done]
        cache.commit(0, accepted)
        done += accepted
        assert cache.lengths == [done]


def test_scratch_leaves_no_trace(case: Case) -> None:
    def run(*, with_scratch: bool) -> Tensor:
        cache = case.backbone.new_cache(1, 40)
        case.forward(cache, TOKENS[0, :10], write=Write.COMMIT)
        if with_scratch:
            case.forward(cache, TOKENS[1, :20])
            case.forward(cache, TOKENS[2, :3])
        return case.logits(cache, TOKENS[0, 10:14])

    assert torch.equal(run(with_scratch=True), run(with_scratch=False))


def test_committing_a_pass_equals_a_commit_after_it(case: Case) -> None:
    caches = [case.backbone.new_cache(1, 40) for _ in range(2)]
    case.forward(caches[0], TOKENS[0, :10], write=Write.COMMIT)
    case.forward(caches[1], TOKENS[0, :10])
    caches[1].commit(0, 4)
    caches[1].commit(0, 6)
    a, b = (case.logits(cache, TOKENS[0, 10:12]) for cache in caches)
    torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("length", [0, 3, 15, 20])
def test_truncate_forgets_the_end(case: Case, length: int) -> None:
    cache = case.backbone.new_cache(1, 40)
    case.forward(cache, TOKENS[1, :length], write=Write.COMMIT) if length else None
    case.forward(cache, TOKENS[0, length:20], write=Write.COMMIT) if length < 20 else None
    case.forward(cache, TOKENS[2, :4])  # scratch on top
    cache.truncate(0, length)
    assert cache.lengths == [length]
    logits = case.logits(cache, TOKENS[1, length : length + 3])
    want = case.expected(TOKENS[1, : length + 3])
    torch.testing.assert_close(logits[0], want[length:], **CLOSE)


def test_gather_of_a_prefix_is_a_commit(case: Case) -> None:
    cache = case.backbone.new_cache(1, 40)
    case.forward(cache, TOKENS[0, :9], write=Write.COMMIT)
    case.forward(cache, torch.cat([TOKENS[0, 9:11], TOKENS[1, :3]]))
    cache.gather(0, [0, 1])
    assert cache.lengths == [11]
    logits = case.logits(cache, TOKENS[0, 11:13])
    torch.testing.assert_close(logits[0], case.expected(TOKENS[0])[11:13], **CLOSE)


def test_a_freed_row_starts_anew_and_others_stay(case: Case) -> None:
    cache = case.backbone.new_cache(2, 40)
    for row in range(2):
        case.forward(cache, TOKENS[row, :12], (row,), write=Write.COMMIT)
    cache.free(0)
    assert cache.lengths == [0, 12]
    fresh = case.logits(cache, TOKENS[2, :5], (0,))
    torch.testing.assert_close(fresh[0], case.expected(TOKENS[2, :5]), **CLOSE)
    kept = case.logits(cache, TOKENS[1, 12:14], (1,))
    torch.testing.assert_close(kept[0], case.expected(TOKENS[1])[12:14], **CLOSE)


def test_rows_do_not_influence_each_other(case: Case) -> None:
    """Rows of different lengths in one pass, in any order, some absent."""
    lengths, rows = (5, 17, 1, 9), (3, 0, 1)
    cache, solo = case.backbone.new_cache(4, 40), []
    for row, length in enumerate(lengths):
        case.forward(cache, TOKENS[row, :length], (row,), write=Write.COMMIT)
    for row in rows:
        alone = case.backbone.new_cache(1, 40)
        case.forward(alone, TOKENS[row, : lengths[row]], write=Write.COMMIT)
        solo.append(case.logits(alone, TOKENS[row, lengths[row] : lengths[row] + 4])[0])
    tokens = torch.stack([TOKENS[row, lengths[row] : lengths[row] + 4] for row in rows])
    logits = case.logits(cache, tokens, rows, write=Write.COMMIT)
    assert cache.lengths == [9, 21, 1, 13]
    torch.testing.assert_close(logits, torch.stack(solo), rtol=0, atol=1e-5)


def test_padding_after_a_rows_tokens_changes_nothing(case: Case) -> None:
    """A ragged batch: [B, T, T] patterns that hide the padding."""
    cache, counts = case.backbone.new_cache(2, 40), (3, 6)
    for row, length in enumerate((4, 11)):
        case.forward(cache, TOKENS[row, :length], (row,), write=Write.COMMIT)
    tokens = torch.stack([TOKENS[0, 4:10], TOKENS[1, 11:17]])
    tokens[0, 3:] = 0
    positions = torch.tensor([[4, 5, 6, 0, 0, 0], [11, 12, 13, 14, 15, 16]])
    pattern = padded(causal((4, 11), 6), counts)
    logits = case.backbone.forward(tokens, positions, pattern, cache, (0, 1)).logits
    assert logits is not None
    for row, (start, count) in enumerate(zip((4, 11), counts, strict=True)):
        want = case.expected(TOKENS[row])[start : start + count]
        torch.testing.assert_close(logits[row, :count], want, **CLOSE)
        cache.commit(row, count)
    after = case.logits(cache, TOKENS[0, 7:9], (0,))
    torch.testing.assert_close(after[0], case.expected(TOKENS[0])[7:9], **CLOSE)


def test_logits_for(case: Case) -> None:
    cache = case.backbone.new_cache(2, 40)
    tokens = TOKENS[:2, :7]
    every = case.logits(cache, tokens, (0, 1))
    last = case.logits(cache, tokens, (0, 1), num_logits=1)
    assert every.shape == (2, 7, 64)
    assert last.shape == (2, 1, 64)
    torch.testing.assert_close(last, every[:, -1:], **CLOSE)
    assert case.forward(cache, tokens, (0, 1), num_logits=0).logits is None


def test_taps_are_the_residual_stream_after_a_layer(case: Case) -> None:
    cache = case.backbone.new_cache(2, 40)
    case.forward(cache, TOKENS[:2, :8], (0, 1), write=Write.COMMIT)
    output = case.forward(cache, TOKENS[:2, 8:12], (0, 1), taps=(0, 2), num_logits=0)
    assert set(output.hidden) == {0, 2}
    with torch.no_grad():
        states = case.reference(TOKENS[:2, :12], output_hidden_states=True).hidden_states
        decoder = case.reference.get_decoder()
        final_norm = getattr(decoder, "norm", None) or decoder.ln_f
        last = final_norm(output.hidden[2])  # transformers' last entry is after the norm
    torch.testing.assert_close(output.hidden[0], states[1][:, 8:12], **CLOSE)
    torch.testing.assert_close(last, states[-1][:, 8:12], **CLOSE)
    assert case.forward(cache, TOKENS[:2, 8:9], (0, 1)).hidden == {}


def test_a_pass_that_does_not_fit_changes_nothing(case: Case) -> None:
    """Not even the rows for which it would fit."""
    cache = case.backbone.new_cache(2, 12)
    case.forward(cache, TOKENS[0, :10], (1,), write=Write.COMMIT)
    with pytest.raises(CapacityError, match="row 1 needs 13 positions, got a cache of 12"):
        case.forward(cache, TOKENS[:2, 10:13], (0, 1), write=Write.COMMIT)
    assert cache.lengths == [0, 10]
    logits = case.logits(cache, TOKENS[0, 10:12], (1,))
    torch.testing.assert_close(logits[0], case.expected(TOKENS[0])[10:12], **CLOSE)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda cache: cache.commit(0, 99),
        lambda cache: cache.truncate(0, 11),
        lambda cache: cache.truncate(0, -1),
    ],
    ids=["commit-too-many", "truncate-beyond", "truncate-negative"],
)
def test_cache_misuse_is_refused(case: Case, misuse: Callable[[Cache], None]) -> None:
    cache = case.backbone.new_cache(1, 40)
    case.forward(cache, TOKENS[0, :10], write=Write.COMMIT)
    case.forward(cache, TOKENS[0, 10:12])
    with pytest.raises(CapacityError):
        misuse(cache)
    assert cache.lengths == [10]
