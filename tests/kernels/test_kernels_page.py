"""The picture in docs/kernels.md is drawn from the patterns themselves."""

from __future__ import annotations

import torch
from repository import ROOT

from hybrid.attention.pattern import bidirectional, block_causal, causal, groups, tree

PICTURES = {  # title: pattern, keys before the new ones
    "AR step": (causal([8], 1), 8),
    "prefill, verify": (causal([8], 4), 8),
    "diffusion draft": (bidirectional([8], 4), 8),
    "full sequence": (bidirectional([0], 4), 0),
    "block-causal, blocks of 2": (block_causal([8], 4, 2), 8),
    "tree verify": (tree([8], [-1, 0, 0, 1]), 8),
    "slots that ride, 2 groups of 2": (groups([[7, 8]], 2), 8),
    "sliding window of 4": (causal([8], 4), 8),
}


def picture(title, pattern, before, width=8):
    """A line of title, then one per token: its view of the cache, and of the new tokens."""
    window = 4 if "window" in title else None
    mask = pattern.row_mask(0, window=window, prefix_width=before)
    if mask is None:
        mask = torch.ones(pattern.num_tokens, before + pattern.num_tokens, dtype=torch.bool)
    lines = [title]
    for row in mask.tolist():
        marks = ["■" if seen else "·" for seen in row]
        cached = marks[:before] + [" "] * (width - before)
        lines.append(f"  {' '.join(cached)} | {' '.join(marks[before:])}")
    return "\n".join(lines)


def test_the_pictures_are_true():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    for title, (pattern, before) in PICTURES.items():
        assert picture(title, pattern, before) in page, picture(title, pattern, before)
