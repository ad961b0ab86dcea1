"""How a masked-diffusion model fills a response: which token it commits in which forward.

The same loop extracts a teacher's trajectories and measures how many tokens a student commits per
forward. Full passes, no cache. Next: hybrid/training/d3llm/batches.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.files import replacing

# (input_ids [B, T], prompt_lens [B]) -> logits [B, T, V]; a row is prompt, response, padding.
Denoiser = Callable[[Tensor, Tensor], Tensor]
# (probabilities [B, n, V], masked [B, n], pass of this block) -> which to commit [B, n]
Rule = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Canvas:
    """What is filled, and how the model is read.

    Attributes:
        response_length: R tokens behind each prompt, all masked at first.
        block_size: the response is finished block by block, from left to right.
        mask_token_id: never committed.
        logit_shift: 1 when row i predicts token i + 1 (Dream), 0 when it predicts token i (LLaDA).
    """

    response_length: int
    block_size: int
    mask_token_id: int
    logit_shift: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A response and the order in which it appeared.

    Attributes:
        tokens: [R] the final tokens.
        steps: [R] the forward, counted from 1, that committed each: the canvas after forward s
            shows the tokens whose step is at most s.
    """

    tokens: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def num_forwards(self) -> int:
        """Forwards until the last token."""
        return max(self.steps)


@torch.no_grad()
def decode(
    denoise: Denoiser,
    prompts: Sequence[Sequence[int]],
    canvas: Canvas,
    rule: Rule,
    device: torch.device | str = "cpu",
) -> list[Trajectory]:
    """Fill the responses of several prompts; a committed token is never changed.

    Args:
        denoise: the model. A row shorter than the longest ends in mask tokens that it must hide
            from the rest of the row.
        prompts: at least one token each.
        canvas: see `Canvas`.
        rule: chooses among the masked positions of the block, at least one per row that has any.
        device: where `denoise` wants its arguments.
    """
    ids, prompt_lens = (t.to(device) for t in masked_rows(prompts, canvas))
    columns = prompt_lens[:, None] + torch.arange(canvas.response_length, device=device)
    rows = torch.arange(len(ids), device=device)[:, None]
    steps, num_forwards = torch.zeros_like(columns), torch.zeros_like(prompt_lens)
    for start in range(0, canvas.response_length, canvas.block_size):
        block = slice(start, start + canvas.block_size)
        where, passes = columns[:, block], 0
        while bool((masked := steps[:, block] == 0).any()):
            num_forwards += masked.any(dim=1)  # a row that is done waits for the others
            logits = denoise(ids, prompt_lens)[rows, where - canvas.logit_shift].double()
            logits[..., canvas.mask_token_id] = -torch.inf
            chosen = rule(logits.softmax(dim=-1), masked, passes) & masked
            ids[rows, where] = torch.where(chosen, logits.argmax(dim=-1), ids[rows, where])
            steps[:, block] = torch.where(chosen, num_forwards[:, None], steps[:, block])
            passes += 1
    pairs = zip(ids[rows, columns].tolist(), steps.tolist(), strict=True)
    return [Trajectory(tuple(tokens), tuple(committed)) for tokens, committed in pairs]


def masked_rows(prompts: Sequence[Sequence[int]], canvas: Canvas) -> tuple[Tensor, Tensor]:
    """Return [B, T] prompts with masked responses and padding, and [B] the prompts' lengths."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max()) + canvas.response_length
    ids = torch.full((len(prompts), width), canvas.mask_token_id)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return ids, lengths


def most_confident(quotas: Sequence[int]) -> Rule:
    """Commit the `quotas[n]` most probable tokens in pass n of a block; ties to the lower index.

    LLaDA's low-confidence remasking (arXiv:2502.09992).
    """

    def rule(probs: Tensor, masked: Tensor, passes: int) -> Tensor:
        confidence = probs.amax(dim=-1).masked_fill(~masked, -1.0)
        order = confidence.argsort(dim=1, descending=True, stable=True)
        return order.argsort(dim=1) < quotas[passes]

    return rule


def even_quotas(num_tokens: int, num_steps: int) -> list[int]:
    """Share out the tokens of a block over its passes, the remainder over the first of them."""
    share, rest = divmod(num_tokens, num_steps)
    return [share + 1] * rest + [share] * (num_steps - rest)


def entropy_at_most(threshold: float) -> Rule:
    """Commit every token of an entropy (nats) up to `threshold`, and always the lowest (d3LLM)."""

    def rule(probs: Tensor, masked: Tensor, passes: int) -> Tensor:
        entropy = torch.special.entr(probs).sum(dim=-1)
        return _and_the_best(entropy <= threshold, entropy, masked)

    return rule


def confidence_above(threshold: float) -> Rule:
    """Commit every token more probable than `threshold`, and always the most probable (D2F)."""

    def rule(probs: Tensor, masked: Tensor, passes: int) -> Tensor:
        confidence = probs.amax(dim=-1)
        return _and_the_best(confidence > threshold, -confidence, masked)

    return rule


def _and_the_best(good: Tensor, cost: Tensor, masked: Tensor) -> Tensor:
    best = cost.masked_fill(~masked, torch.inf).argmin(dim=1, keepdim=True)
    return good.scatter(1, best, True)


def decoding_metrics(
    decoded: Sequence[Trajectory], expected: Sequence[Sequence[int]], eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Compare decoded responses with the expected ones, up to the latter's end.

    Returns:
        "tokens_per_forward", the tokens up to the first EOS over all forwards, and "agreement",
        the share of expected tokens (up to EOS) that were decoded at their place.
    """
    num_tokens = sum(_end(d.tokens, eos_token_ids) for d in decoded)
    same = total = 0
    for trajectory, tokens in zip(decoded, expected, strict=True):
        end = _end(tokens, eos_token_ids)
        same += sum(a == b for a, b in zip(trajectory.tokens[:end], tokens[:end], strict=True))
        total += end
    return {
        "tokens_per_forward": round(num_tokens / sum(d.num_forwards for d in decoded), 4),
        "agreement": round(same / total, 4),
    }


def _end(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> int:
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return index + 1
    return len(tokens)


def extract(
    path: Path,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    decode_batch: Callable[[Sequence[Sequence[int]]], list[Trajectory]],
) -> list[Trajectory]:
    """Return the trajectory of each prompt, decoding those that `path` does not hold yet.

    Killed and run again it goes on behind the last whole batch. Several processes may call it at
    once: one decodes, the others wait and read.

    Args:
        path: JSON lines, one trajectory each, in the order of the prompts.
        prompts: all of them.
        batch_size: prompts per call of `decode_batch`.
        decode_batch: decodes some prompts.

    Raises:
        CheckpointError: the file cannot be read or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        found = _read(path)
        if len(found) < len(prompts):
            found = found[: len(found) // batch_size * batch_size]
            with replacing(path) as part:  # drops a line that a kill cut short
                part.write_text("".join(map(_line, found)), encoding="utf-8")
        for start in range(len(found), len(prompts), batch_size):
            batch = decode_batch(prompts[start : start + batch_size])
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(map(_line, batch)))
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written: {error}. Free some space or mend the folder; the "
                    "same command goes on behind what was written."
                ) from error
            found += batch
    return found


def _line(trajectory: Trajectory) -> str:
    return json.dumps({"tokens": trajectory.tokens, "steps": trajectory.steps}) + "\n"


def _read(path: Path) -> list[Trajectory]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Remove it to decode again.") from (
            error
        )
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            found.append(Trajectory(tuple(row["tokens"]), tuple(row["steps"])))
        except (ValueError, TypeError, KeyError):
            break  # a kill cut it short
    return found
