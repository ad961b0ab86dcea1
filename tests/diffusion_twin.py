"""A slow float64 decoder for checkpoints of every diffusion family, written from their formats.

It shares nothing with hybrid/models: it reads tensors by the families' own names, takes the mask as
a matrix, and computes head by head, token by token, expert by expert.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Twin:
    """One checkpoint in float64."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.tensors = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
        self.kind: str = raw["model_type"]
        if self.kind == "llada":
            pairs = {
                "hidden_size": "d_model",
                "num_attention_heads": "n_heads",
                "num_key_value_heads": "n_kv_heads",
                "num_hidden_layers": "n_layers",
            }
            raw = {**raw, **{ours: raw[theirs] for ours, theirs in pairs.items()}}
        self.config: dict[str, Any] = raw
        self.num_heads, self.num_groups = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.dim = raw.get("head_dim") or raw["hidden_size"] // self.num_heads
        self.top = {"llada": "model.transformer", "nemotron_labs_diffusion": "encoder"}.get(
            self.kind, "model"
        )

    def logits(self, ids: list[int], mask: Tensor) -> Tensor:
        """Return [T, V] for tokens at positions 0, 1, ...; mask[query, key] is True where seen."""
        embedding = {"llada": "wte", "llada2_moe": "word_embeddings"}.get(self.kind, "embed_tokens")
        table = self.tensors[f"{self.top}.{embedding}.weight"]
        x = table[ids]
        for n in range(self.config["num_hidden_layers"]):
            x = x + self.attention(n, self.norm(x, self.layer(n, "norm1")), mask)
            x = x + self.mlp(n, self.norm(x, self.layer(n, "norm2")))
        x = self.norm(x, f"{self.top}.{'ln_f' if self.kind == 'llada' else 'norm'}")
        heads = {"llada": "model.transformer.ff_out", "nemotron_labs_diffusion": "diffusion_head"}
        head = self.tensors.get(f"{heads.get(self.kind, 'lm_head')}.weight")
        return x @ (table if head is None else head).T

    def layer(self, n: int, what: str) -> str:
        """Return the family's own name of a part of layer n."""
        llada = {"norm1": "attn_norm", "norm2": "ff_norm", "o": "attn_out", "gate": "ff_proj"}
        llada |= {"up": "up_proj", "down": "ff_out", "q": "q_proj", "k": "k_proj", "v": "v_proj"}
        if self.kind == "llada":
            return f"{self.top}.blocks.{n}.{llada[what]}"
        if what in {"norm1", "norm2"}:
            name = "input_layernorm" if what == "norm1" else "post_attention_layernorm"
            return f"{self.top}.layers.{n}.{name}"
        if what in {"gate", "up", "down"}:
            return f"{self.top}.layers.{n}.mlp.{what}_proj"
        if self.kind == "llada2_moe":
            names = {"o": "dense", "q_norm": "query_layernorm", "k_norm": "key_layernorm"}
            return f"{self.top}.layers.{n}.attention.{names.get(what, what)}"
        return f"{self.top}.layers.{n}.self_attn.{what if 'norm' in what else what + '_proj'}"

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return (
            x / (mean_square + self.config["rms_norm_eps"]).sqrt() * self.tensors[f"{name}.weight"]
        )

    def attention(self, n: int, x: Tensor, mask: Tensor) -> Tensor:
        heads, groups = self.num_heads * self.dim, self.num_groups * self.dim
        if self.kind == "llada2_moe":
            fused = self.linear(x, self.layer(n, "query_key_value"))
            q, k, v = fused.split([heads, groups, groups], dim=-1)
        else:
            q, k, v = (self.linear(x, self.layer(n, name)) for name in "qkv")
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in (q, k, v))
        if self.kind != "llada" and f"{self.layer(n, 'q_norm')}.weight" in self.tensors:
            q, k = self.norm(q, self.layer(n, "q_norm")), self.norm(k, self.layer(n, "k_norm"))
        for position in range(len(x)):
            q[position] = self.rotate(q[position], position) * self.query_scale(position)
            k[position] = self.rotate(k[position], position)
        out = torch.zeros(len(x), self.num_heads, self.dim, dtype=torch.float64)
        for head in range(self.num_heads):
            group = head * self.num_groups // self.num_heads
            for query in range(len(x)):
                scores = k[:, group] @ q[query, head] / math.sqrt(self.dim)
                weights = scores.masked_fill(~mask[query], -math.inf).softmax(dim=0)
                out[query, head] = weights @ v[:, group]
        return self.linear(out.flatten(1), self.layer(n, "o"))

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Rotate the heads [H, D] of one token."""
        width = int(self.dim * self.config.get("partial_rotary_factor", 1.0))
        rotated = x.clone()
        for i in range(width // 2):
            angle = position * self.frequency(i, width)
            a, b = x[:, i], x[:, i + width // 2]
            rotated[:, i] = a * math.cos(angle) - b * math.sin(angle)
            rotated[:, i + width // 2] = b * math.cos(angle) + a * math.sin(angle)
        return rotated

    def frequency(self, index: int, width: int) -> float:
        rope = self.config.get("rope_parameters") or {}
        theta = rope.get("rope_theta") or self.config["rope_theta"]
        plain = theta ** (-2 * index / width)
        if rope.get("rope_type") != "yarn":
            return plain
        # Dimensions that turn beta_fast times in the trained context stay, those of beta_slow
        # times are interpolated, a ramp between; equal mscales leave the softmax as it is.
        assert rope["mscale"] == rope["mscale_all_dim"]
        trained = rope["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dimension(rope["beta_fast"])), 0)
        high = min(math.ceil(dimension(rope["beta_slow"])), width - 1)
        ramp = min(max((index - low) / ((high - low) or 0.001), 0), 1)
        return plain / rope["factor"] * ramp + plain * (1 - ramp)

    def query_scale(self, position: int) -> float:
        rope = self.config.get("rope_parameters") or {}
        if not rope.get("llama_4_scaling_beta"):
            return 1.0
        steps = position // rope["original_max_position_embeddings"]
        return 1 + rope["llama_4_scaling_beta"] * math.log(1 + steps)

    def mlp(self, n: int, x: Tensor) -> Tensor:
        prefix = f"{self.top}.layers.{n}.mlp"
        if f"{prefix}.gate.weight" not in self.tensors:
            return self.swiglu(x, *(self.layer(n, part) for part in ("gate", "up", "down")))
        y = torch.stack([self.experts(prefix, token) for token in x])
        if f"{prefix}.shared_experts.up_proj.weight" in self.tensors:
            y = y + self.expert(x, f"{prefix}.shared_experts")
        return y

    def swiglu(self, x: Tensor, gate: str, up: str, down: str) -> Tensor:
        z = self.linear(x, gate)
        return self.linear(z / (1 + (-z).exp()) * self.linear(x, up), down)

    def expert(self, x: Tensor, prefix: str) -> Tensor:
        return self.swiglu(x, *(f"{prefix}.{part}_proj" for part in ("gate", "up", "down")))

    def experts(self, prefix: str, token: Tensor) -> Tensor:
        """Return the routed part [C] for one token [C]."""
        c, logits = self.config, (self.tensors[f"{prefix}.gate.weight"] @ token).tolist()
        if self.kind == "llada2_moe":
            scores = [1 / (1 + math.exp(-z)) for z in logits]
            bias = self.tensors[f"{prefix}.gate.expert_bias"].tolist()
            ranking = [score + b for score, b in zip(scores, bias, strict=True)]
            chosen = _best_in_groups(
                ranking, c["num_experts_per_tok"], c["n_group"], c["topk_group"]
            )
            factor = c["routed_scaling_factor"]
        else:
            scores = [math.exp(z) / sum(map(math.exp, logits)) for z in logits]
            chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[
                : c["num_experts_per_tok"]
            ]
            factor = 1.0
        total = sum(scores[e] for e in chosen) if c["norm_topk_prob"] else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            weight = factor * scores[e] / total
            out = out + weight * self.expert(token[None], f"{prefix}.experts.{e}")[0]
        return out


def _best_in_groups(ranking: list[float], num: int, num_groups: int, num_kept: int) -> list[int]:
    """Return the best experts among the groups whose two best experts are best together."""
    size = len(ranking) // num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
    value = [sum(sorted((ranking[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(num_groups), key=lambda g: -value[g])[:num_kept]
    allowed = [e for g in kept for e in groups[g]]
    return sorted(allowed, key=lambda e: -ranking[e])[:num]
