"""The teacher's trajectories, decoded once per run. Next: hybrid/training/d3llm/recipe.py."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence

from hybrid.errors import ConfigError
from hybrid.models.loading import choose_device
from hybrid.training.checkpoint import model_sha256
from hybrid.training.d3llm.config import D3LLMConfig
from hybrid.training.loop import autocast
from hybrid.training.masked_diffusion import Setting, full_attention
from hybrid.training.trainable import Trainable, load_trainable
from hybrid.training.trajectory import (
    Canvas,
    Trajectory,
    decode,
    even_quotas,
    extract,
    most_confident,
)


def canvas_of(config: D3LLMConfig, setting: Setting) -> Canvas:
    """Return what teacher and student fill."""
    return Canvas(
        config.response_length, config.block_size, setting.mask_token_id, config.logit_shift
    )


def teacher_trajectories(config: D3LLMConfig, setting: Setting) -> list[Trajectory]:
    """Return the teacher's trajectory of each training and then of each held-out prompt.

    They are kept in the run's folder, in a file whose name is a hash of what they depend on; a run
    that was killed goes on decoding where it was.

    Raises:
        ConfigError: a prompt leaves no room for a response, or the teacher's vocabulary differs.
        CheckpointError: the teacher cannot be loaded, or the file not be written.
    """
    prompts = [example.prompt for example in (*setting.train, *setting.held_out)]
    _check_room(config, setting.trainable, prompts)
    canvas = canvas_of(config, setting)
    num_blocks = config.response_length // config.block_size
    rule = most_confident(even_quotas(config.block_size, config.num_trajectory_steps // num_blocks))

    @functools.cache  # only where something is left to decode
    def teacher() -> Trainable:
        # Nothing is trained yet, so the model is its own teacher.
        return setting.trainable if config.teacher is None else _load(config, setting.trainable)

    def decode_batch(prompts: Sequence[Sequence[int]]) -> list[Trajectory]:
        model = teacher()
        with autocast(config, model.device):
            return decode(full_attention(model, canvas), prompts, canvas, rule, model.device)

    depends_on = [
        model_sha256(config.teacher or config.model),
        *(canvas.response_length, canvas.block_size, canvas.mask_token_id, canvas.logit_shift),
        config.num_trajectory_steps,
        config.precision,
        prompts,
    ]
    digest = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
    path = config.output / f"trajectories-{digest[:12]}.jsonl"
    return extract(path, prompts, config.teacher_batch_size, decode_batch)


def _load(config: D3LLMConfig, student: Trainable) -> Trainable:
    assert config.teacher is not None
    teacher = load_trainable(config.teacher, device=choose_device(config.device))
    if teacher.vocab_size != student.vocab_size:
        raise ConfigError(
            f"teacher: got a vocabulary of {teacher.vocab_size}, expected the model's "
            f"{student.vocab_size}."
        )
    return teacher


def _check_room(
    config: D3LLMConfig, trainable: Trainable, prompts: Sequence[Sequence[int]]
) -> None:
    limit = min(config.max_length, trainable.max_length)
    longest = max(map(len, prompts))
    if longest + config.response_length > limit:
        raise ConfigError(
            f"response_length: the longest prompt has {longest} tokens; with "
            f"{config.response_length} more it exceeds {limit} (max_length, or the model's "
            "context)."
        )
