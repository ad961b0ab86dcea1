"""`FeatureCache` beside a slow twin that computes all and then decides what to take over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_twins import model
from torch import Tensor

from hybrid.attention.pattern import bidirectional
from hybrid.models.elementwise import gate
from hybrid.models.feature_cache import FeatureCache
from hybrid.models.transformer import NativeBackbone
from hybrid.types import Write

LENGTH = 11


def texts(num_passes: int, seed: int = 0) -> list[list[int]]:
    """Return a text at each pass: one or two tokens differ from the pass before."""
    generator = torch.Generator().manual_seed(seed)
    text, out = torch.randint(1, 20, (LENGTH,), generator=generator).tolist(), []
    for _ in range(num_passes):
        out.append(list(text))
        for _ in range(2):
            at, token = torch.randint(3, 20, (2,), generator=generator).tolist()
            text[at % LENGTH] = token
    return out


def run(
    backbone: NativeBackbone, rows: list[list[list[int]]], features: list[FeatureCache] | None
) -> list[Tensor]:
    """Run passes over the texts of several rows; return the logits [B, T, V] of each."""
    cache, out = backbone.new_cache(len(rows), LENGTH), []
    for number, tokens in enumerate(zip(*rows, strict=True)):
        size, first = len(tokens[0]), number == 0 or features is None
        prefix = [0 if first else LENGTH] * len(rows)
        if features is None:
            for row in range(len(rows)):
                cache.free(row)
        result = backbone.forward(
            torch.tensor(tokens),
            torch.arange(size).repeat(len(rows), 1),
            bidirectional(prefix, size),
            cache,
            range(len(rows)),
            write=Write.SCRATCH if first else Write.REFRESH,
            features=features,
        )
        if first and features is not None:
            for row in range(len(rows)):
                cache.commit(row, size)
        assert result.logits is not None
        out.append(result.logits)
    return out


class Twin:
    """Layer by layer, one row: everything is computed, then what is due is taken over."""

    def __init__(self, backbone: Any, num_prompt: int, prompt: int, response: int, ratio: float):
        self.backbone, self.num_prompt, self.ratio = backbone, num_prompt, ratio
        self.prompt, self.response, self.number = prompt, response, 0
        self.held: list[dict[str, Tensor]] = [{} for _ in backbone.layers]

    def project(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q and k, and v, [T, heads, D]."""
        spec, norm = self.backbone.spec, self.backbone.rms_norm
        sizes = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, spec.head_dim))
            for part in layer.qkv(norm(x, layer.input_norm)).split(sizes, dim=-1)
        )
        at = torch.arange(len(x))[None]
        cos, sin = (part[0][:, None] for part in self.backbone.rope(at, at + 1))
        q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        halves = [(part.chunk(2, dim=-1)) for part in (q, k)]
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1) for a, b in halves)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        per_group = q.shape[1] // k.shape[1]
        heads = []
        for head in range(q.shape[1]):
            keys, values = k[:, head // per_group], v[:, head // per_group]
            scores = q[:, head] @ keys.T / q.shape[-1] ** 0.5
            heads.append(scores.softmax(dim=-1) @ values)
        return torch.cat(heads, dim=-1)

    def __call__(self, tokens: list[int]) -> Tensor:
        x = self.backbone.embedding[torch.tensor(tokens)]
        size = len(tokens)
        renew_prompt = self.number % self.prompt == 0
        for index, layer in enumerate(self.backbone.layers):
            held = self.held[index]
            q, k, v = self.project(layer, x)
            if not held:
                zeros = torch.zeros_like(x)
                held.update(k=k.clone(), v=v.clone(), attention=zeros, mlp=zeros.clone())
            renew_response = self.number % self.response == 0 or index == 0
            chosen = list(range(self.num_prompt)) if renew_prompt else []
            new_values = list(chosen)
            if renew_response:
                chosen += range(self.num_prompt, size)
                new_values += range(self.num_prompt, size)
            elif self.ratio:
                response = range(self.num_prompt, size)
                alike = {
                    t: float(torch.cosine_similarity(v[t].flatten(), held["v"][t].flatten(), dim=0))
                    for t in response
                }
                count = int(len(response) * self.ratio)
                chosen += sorted(response, key=alike.__getitem__)[:count]
                new_values += response
            held["v"][new_values] = v[new_values]
            held["k"][chosen] = k[chosen]
            update = layer.o(self.attend(q, held["k"][:size], held["v"][:size]))
            held["attention"][chosen] = update[chosen]
            x = x + held["attention"][:size]
            h = self.backbone.rms_norm(x, layer.post_norm)
            held["mlp"][chosen] = layer.down(gate(layer.gate_up(h)))[chosen]
            x = x + held["mlp"][:size]
        self.number += 1
        return self.backbone.head(self.backbone.rms_norm(x, self.backbone.norm))


CASES = [(3, 4, 2, 0.3), (3, 2, 3, 0.0), (1, 5, 4, 1.0), (4, 3, 6, 0.5), (2, 1, 100, 0.05)]


@pytest.mark.parametrize(("num_prompt", "prompt", "response", "ratio"), CASES)
def test_twin(num_prompt: int, prompt: int, response: int, ratio: float) -> None:
    backbone, passes = model(), texts(9)
    twin = Twin(backbone, num_prompt, prompt, response, ratio)
    ours = run(backbone, [passes], [FeatureCache(num_prompt, prompt, response, ratio)])
    for number, (tokens, logits) in enumerate(zip(passes, ours, strict=True)):
        torch.testing.assert_close(
            logits[0], twin(tokens), msg=lambda m, n=number: f"pass {n}: {m}"
        )


def test_intervals_of_one_reuse_nothing() -> None:
    backbone, passes = model(), texts(5)
    ours = run(backbone, [passes], [FeatureCache(3, 1, 1, 0.25)])
    for mine, plain in zip(ours, run(backbone, [passes], None), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def test_something_is_reused() -> None:
    backbone, passes = model(), texts(2)
    ours = run(backbone, [passes], [FeatureCache(3, 9, 9, 0.25)])
    assert not torch.allclose(ours[1], run(backbone, [passes], None)[1])


def test_rows_of_other_prompts_and_clocks_share_a_pass() -> None:
    backbone, rows = model(), [texts(7, seed) for seed in range(3)]
    clocks = [(3, 2, 3, 0.4), (5, 4, 2, 0.4), (1, 9, 5, 0.0)]
    together = run(backbone, rows, [FeatureCache(*clock) for clock in clocks])
    for row, (passes, clock) in enumerate(zip(rows, clocks, strict=True)):
        for mine, alone in zip(
            together, run(backbone, [passes], [FeatureCache(*clock)]), strict=True
        ):
            torch.testing.assert_close(mine[row], alone[0], rtol=0, atol=1e-12)


def test_a_pass_over_the_first_tokens_leaves_the_others_alone() -> None:
    backbone, passes = model(), texts(6)
    passes[2], passes[3] = passes[2][:7], passes[3][:7]
    twin = Twin(backbone, 3, 4, 3, 0.4)
    ours = run(backbone, [passes], [FeatureCache(3, 4, 3, 0.4)])
    for tokens, logits in zip(passes, ours, strict=True):
        torch.testing.assert_close(logits[0], twin(tokens))
