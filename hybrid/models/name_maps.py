"""Names of tensors: what a family calls them, and what the native backbone does.

Canonical names are those of Llama and Qwen: `model.embed_tokens`, `model.layers.N.input_layernorm`,
`model.layers.N.self_attn.q_proj`, ... A map is a table of replacements, applied in its order, so a
name that is part of another comes after it. Next: hybrid/models/weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hybrid.models.checkpoint import Weight

NameMap = Mapping[str, str]

LLADA: NameMap = {
    "model.transformer.wte.": "model.embed_tokens.",
    "model.transformer.ln_f.": "model.norm.",
    "model.transformer.ff_out.": "lm_head.",  # not the `ff_out` of a block
    "model.transformer.blocks.": "model.layers.",
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".q_proj.": ".self_attn.q_proj.",
    ".k_proj.": ".self_attn.k_proj.",
    ".v_proj.": ".self_attn.v_proj.",
    ".attn_out.": ".self_attn.o_proj.",
    ".ff_proj.": ".mlp.gate_proj.",
    ".up_proj.": ".mlp.up_proj.",
    ".ff_out.": ".mlp.down_proj.",
}
LLADA2: NameMap = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.query_key_value.": ".self_attn.qkv_proj.",
    ".attention.query_layernorm.": ".self_attn.q_norm.",
    ".attention.key_layernorm.": ".self_attn.k_norm.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
}
NEMOTRON: NameMap = {"encoder.": "model.", "diffusion_head.": "lm_head."}


def canonical(name: str, names: NameMap) -> str:
    """Return the canonical name of a tensor, or of a LoRA update of it."""
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


class Renamed(Mapping[str, Weight]):
    """The tensors of a checkpoint by their canonical names; still read when they are taken."""

    def __init__(self, tensors: Mapping[str, Weight], names: NameMap) -> None:
        self._tensors = tensors
        self._stored = {canonical(name, names): name for name in tensors}

    def __getitem__(self, name: str) -> Weight:
        return self._tensors[self._stored[name]]

    def __contains__(self, name: object) -> bool:  # the inherited one would read the tensor
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
