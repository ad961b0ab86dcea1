"""DiffusionGemma through transformers' own classes: canvas after canvas, each denoised whole.

It has no mask token: a canvas begins as random tokens, and each step draws again what it is not
sure of (entropy-bounded sampling with self-conditioning). So none of this project's policies
applies; the model brings its own loop, and what is added here is a random stream per row and one
canvas at a time. Next: hybrid/decode/stopping.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from hybrid.config import Config
from hybrid.models.checkpoint import read_json, refuse_foreign_code, token_ids
from hybrid.models.compat import cache_argument
from hybrid.models.pretrained import load_pretrained
from hybrid.types import Context

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CanvasSettings(Config):
    """What DiffusionGemma's own `generate` can be told; None is what the checkpoint says.

    Attributes:
        max_denoising_steps: passes of a canvas at most.
        entropy_bound: a step keeps its surest tokens while the entropies before them sum to at most
            this many nats.
        t_max: temperature of the first step.
        t_min: of the last one.
        stability_threshold: a canvas is done when it has not changed for so many steps ...
        confidence_threshold: ... and its mean entropy, in nats, is below this.
    """

    max_denoising_steps: Annotated[int, Field(ge=1)] | None = None
    entropy_bound: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    t_max: _Positive | None = None
    t_min: _Positive | None = None
    stability_threshold: Annotated[int, Field(ge=0)] | None = None
    confidence_threshold: _Positive | None = None

    def options(self) -> dict[str, Any]:
        """Return what is set, under the names of transformers' `generate`."""
        given = self.model_dump(exclude_none=True)
        if (bound := given.pop("entropy_bound", None)) is not None:
            # Here, because no other model needs what comes with it.
            from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
                EntropyBoundSamplerConfig,
            )

            given["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=bound)
        return given


@dataclass(frozen=True, slots=True)
class DenoisedCanvas:
    """One canvas of an answer.

    Attributes:
        tokens: its ids.
        num_steps: passes over it; the pass that encoded what precedes it comes on top.
    """

    tokens: tuple[int, ...]
    num_steps: int


class DiffusionGemma:
    """A DiffusionGemma checkpoint. It decodes, but runs no pass of somebody else's choice.

    Attributes:
        canvas_length: tokens of a canvas.
        vocab_size: see `Backbone`, as for the others.
    """

    mask_token_id = None
    context = Context.CAUSAL
    can_verify = False
    default_strategy = "diffusion-gemma"

    def __init__(self, model: Any) -> None:
        """Keep transformers' model, in evaluation mode."""
        self._model = model.eval()
        text = model.config.text_config
        self.canvas_length: int = model.config.canvas_length
        self.vocab_size: int = text.vocab_size
        self.max_seq_len: int = text.max_position_embeddings
        self.eos_token_ids = token_ids(model.generation_config.eos_token_id) or token_ids(
            text.eos_token_id
        )
        self.device, self.dtype = model.device, model.dtype

    @classmethod
    def from_path(cls, path: Path, device: torch.device, dtype: torch.dtype) -> DiffusionGemma:
        """Load a folder; no code that it brings is run.

        Raises:
            CheckpointError: it cannot be loaded, or this transformers does not know the family.
        """
        refuse_foreign_code(read_json(path / "config.json"), path / "config.json")
        model = load_pretrained("DiffusionGemmaForBlockDiffusion", path, dtype)
        return cls(model.to(device))

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights, shared ones once."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def canvases(
        self, prompt: Sequence[int], settings: CanvasSettings, seed: int
    ) -> Generator[DenoisedCanvas, None, None]:
        """Yield the canvases of an answer, without end: EOS and limits are the reader's.

        Equal to one call of transformers' `generate` under the same seed. The global random
        streams are left as they were.

        Args:
            prompt: token ids.
            settings: of every canvas.
            seed: of this answer's random stream.
        """
        stream = _Stream(seed, self.device)
        cache_name = cache_argument(self._model.generate)
        assert cache_name is not None
        tokens, cache = torch.tensor([list(prompt)], device=self.device), None
        while True:
            counter = _StepCounter()
            with stream, torch.inference_mode():
                out = self._model.generate(
                    tokens,
                    streamer=counter,
                    max_new_tokens=self.canvas_length,
                    max_length=None,
                    eos_token_id=None,  # nothing is cut or padded here
                    **{cache_name: cache},
                    **settings.options(),
                )
            cache = getattr(out, cache_name)
            tokens = out.sequences[:, -self.canvas_length :]
            yield DenoisedCanvas(tuple(tokens[0].tolist()), counter.num_steps)


class _StepCounter:
    """A streamer that counts the passes."""

    num_steps = 0

    def put(self, value: torch.Tensor) -> None:
        """Ignore what is final: it is in the output."""

    def put_draft(self, value: torch.Tensor) -> None:
        """Count a pass."""
        self.num_steps += 1

    def end(self) -> None:
        """Nothing is buffered."""


class _Stream:
    """Torch's global random streams with a state of one's own, in a `with` block."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._states: list[torch.Tensor] | None = None

    def __enter__(self) -> None:
        is_cuda = self._device.type == "cuda"
        self._fork = torch.random.fork_rng(devices=[self._device] if is_cuda else [])
        self._fork.__enter__()
        if self._states is None:
            torch.manual_seed(self._seed)
            return
        torch.set_rng_state(self._states[0])
        if is_cuda:
            torch.cuda.set_rng_state(self._states[1], self._device)

    def __exit__(self, *error: Any) -> None:
        self._states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(self._device))
        self._fork.__exit__(*error)
