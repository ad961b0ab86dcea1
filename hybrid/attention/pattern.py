"""`AttentionPattern`: T new tokens, each sees a prefix of the cache and some of the new tokens.

Every mask of every system here is one of these objects; which one is what makes a pass
autoregressive or diffusion. It knows indices only, no tensors of a model.
Next: kernels/block_attention/reference.py, which computes attention under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Who sees whom in one pass.

    Attributes:
        prefix_len: [B] how many cached positions each row sees; or [B][T] when the tokens of a
            row differ.
        local: [T, T] or [B, T, T] boolean, True where query (second to last axis) sees key.
        is_causal: `local` is the lower triangle (kernels may use a shortcut).
        is_full: `local` hides nothing (likewise).
        positions: [B][T] of the new tokens; None where new token t follows the prefix at
            prefix + t. Cached position i has position i. Sliding windows go by them.
    """

    prefix_len: tuple[int, ...] | tuple[tuple[int, ...], ...]
    local: Tensor
    is_causal: bool = False
    is_full: bool = False
    positions: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """T, the new tokens per row."""
        return int(self.local.shape[-1])

    def row_prefix(self, row: int) -> int:
        """Return the most cached positions that any token of the row sees."""
        prefix = self.prefix_len[row]
        return prefix if isinstance(prefix, int) else max(prefix, default=0)

    def row_mask(
        self, row: int, *, window: int | None = None, prefix_width: int | None = None
    ) -> Tensor | None:
        """Return one row's dense mask, or None when every token sees everything.

        Args:
            row: index in the batch.
            window: sliding window of the layer: a query at position p sees keys at p - window + 1
                and later.
            prefix_width: P where it is more than `row_prefix(row)`: nobody sees what is between.

        Returns:
            [T, P + T] boolean, P = `row_prefix(row)`.
        """
        num_tokens, prefix = self.num_tokens, self.prefix_len[row]
        width = self.row_prefix(row) if prefix_width is None else prefix_width
        sees_all = num_tokens == 1 or self.is_full
        if (
            sees_all
            and isinstance(prefix, int)
            and prefix == width
            and (window is None or width + num_tokens <= window)
        ):
            return None
        local = self.local if self.local.ndim == 2 else self.local[row]
        mask = torch.ones(num_tokens, width + num_tokens, dtype=torch.bool, device=local.device)
        mask[:, width:] = local
        limits = torch.tensor(prefix, device=local.device).view(-1, 1)
        mask[:, :width] = torch.arange(width, device=local.device) < limits
        if window is not None:
            keys = torch.arange(width + num_tokens, device=local.device)
            if self.positions is not None:
                keys[width:] = torch.tensor(self.positions[row], device=local.device)
            mask &= keys > keys[width:, None] - window
        return mask


def causal(prefix_len: Sequence[int], num_tokens: int) -> AttentionPattern:
    """AR prefill, AR decode and verify: each token sees the cache, itself and earlier tokens."""
    local = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril_()
    return AttentionPattern(tuple(prefix_len), local, is_causal=True)


def bidirectional(prefix_len: Sequence[int], num_tokens: int) -> AttentionPattern:
    """Diffusion draft: the anchor and the masked slots see the cache and each other."""
    return AttentionPattern(tuple(prefix_len), _ones(num_tokens), is_full=True)


def full_sequence(batch: int, num_tokens: int) -> AttentionPattern:
    """LLaDA, Dream: no cache, everything sees everything."""
    return bidirectional((0,) * batch, num_tokens)


def block_causal(
    prefix_len: Sequence[int], num_tokens: int, block_size: int, offset: int = 0
) -> AttentionPattern:
    """SDAR, D2F, Fast-dLLM v2: a token sees its own block and the blocks before it.

    Args:
        prefix_len: cached positions per row, all seen.
        num_tokens: T.
        block_size: positions per block.
        offset: how many positions of the first block lie before the first new token.
    """
    if block_size < 1:
        raise ConfigError(f"block_size: got {block_size}, expected at least 1.")
    block = (torch.arange(num_tokens) + offset) // block_size
    return AttentionPattern(tuple(prefix_len), block[:, None] >= block[None, :])


def groups(
    prefix_len: Sequence[Sequence[int]], group_size: int, *, is_causal: bool = False
) -> AttentionPattern:
    """Verify and draft in one forward: the slots that ride in a target pass, in groups.

    TiDAR (arXiv:2511.08923) and quadratic self-speculation have a group for each acceptance point.
    The prefix of a group counts what is cached and the target's tokens that it takes for accepted;
    its slots stand behind that prefix and see it and each other.

    Args:
        prefix_len: [B][G] of each group.
        group_size: slots per group.
        is_causal: a slot sees those before it in its group alone.
    """
    num_groups = len(prefix_len[0])
    block = torch.ones(group_size, group_size, dtype=torch.bool)
    local = torch.block_diag(*[block.tril() if is_causal else block] * num_groups).bool()  # type: ignore[no-untyped-call]
    prefixes = tuple(tuple(n for n in row for _ in range(group_size)) for row in prefix_len)
    positions = tuple(tuple(n + i for n in row for i in range(group_size)) for row in prefix_len)
    return AttentionPattern(prefixes, local, positions=positions)


def tree(prefix_len: Sequence[int], parents: Sequence[int]) -> AttentionPattern:
    """Tree verify: a token sees the cache, its ancestors and itself.

    Args:
        prefix_len: cached positions per row.
        parents: [T] index of each token's parent among the new tokens, -1 for a root; a parent
            comes before its children.
    """
    local = torch.eye(len(parents), dtype=torch.bool)
    for child, parent in enumerate(parents):
        if not -1 <= parent < child:
            raise ConfigError(
                f"parents: token {child} has parent {parent}, expected an earlier token or -1."
            )
        if parent >= 0:
            local[child] |= local[parent]
    return AttentionPattern(tuple(prefix_len), local)


def padded(
    pattern: AttentionPattern, num_valid: Sequence[int], *, left: bool = False
) -> AttentionPattern:
    """Ragged batch: hide the padding keys of each row from its real tokens.

    Args:
        pattern: the pattern of the unpadded tokens, [T, T].
        num_valid: real tokens per row; the rest is padding.
        left: the padding is on the left.
    """
    num_tokens = pattern.num_tokens
    index = torch.arange(num_tokens)
    rows = []
    for count in num_valid:
        real = index >= num_tokens - count if left else index < count
        # A padding query sees itself, so that its softmax is defined; nobody reads its output.
        rows.append((pattern.local & real[None, :] & real[:, None]) | torch.diag(~real))
    return AttentionPattern(pattern.prefix_len, torch.stack(rows))


def _ones(num_tokens: int) -> Tensor:
    return torch.ones((), dtype=torch.bool).expand(num_tokens, num_tokens)
