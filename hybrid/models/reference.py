"""`TransformersReference`: the same checkpoint under transformers' own class and `generate`.

What float32 output is compared with, and what speed is measured against. It shares no code with
the engine. Next: hybrid/bench/candidates.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import read_json, refuse_foreign_code


class TransformersReference:
    """A checkpoint in float32, decoded greedily by transformers."""

    def __init__(self, path: str | Path, device: torch.device | str = "cpu") -> None:
        """Load a local Hugging Face folder with dense weights.

        Raises:
            CheckpointError: transformers cannot load it.
        """
        config = Path(path) / "config.json"
        refuse_foreign_code(read_json(config), config)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
            )
        except Exception as error:  # each model class raises what it likes
            raise CheckpointError(
                f"transformers cannot load {path}: {error} "
                "Give a folder with dense weights, or leave the comparison out."
            ) from error
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        # Only where an answer ends: the checkpoint's own settings may sample or penalise.
        eos = model.generation_config.eos_token_id
        pad = eos[0] if isinstance(eos, list) else eos
        self._model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=eos, pad_token_id=pad
        )

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        """Return the greedy continuation of `prompt`, the EOS id included."""
        ids = torch.tensor([list(prompt)], device=self._device)
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens
        )
        return tuple(output[0, len(prompt) :].tolist())

    def drafted_steps(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, drafter: Path
    ) -> list[list[tuple[int, ...]]]:
        """Decode greedily, past end tokens, with transformers' own DFlash drafting.

        Args:
            prompts: token ids.
            max_new_tokens: of each answer.
            drafter: folder in the layout of transformers.

        Returns:
            For each prompt the tokens that each pass of the target committed, the prefill first.

        Raises:
            CheckpointError: transformers cannot load the drafter.
        """
        from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

        try:
            assistant = MuseGlimmerAssistantModel.from_pretrained(
                str(drafter), dtype=torch.float32, local_files_only=True
            )
        except Exception as error:  # as above
            raise CheckpointError(f"transformers cannot load {drafter}: {error}") from error
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, speculation_type="dflash"
        )
        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self._device)
            passes = _Passes()
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant.to(self._device).eval(),
                generation_config=settings,
                streamer=passes,
            )
            found.append(passes.tokens[1:])  # the prompt comes first
        return found

    @torch.inference_mode()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits [V] of the token after `ids`."""
        logits: Tensor = self._model(torch.tensor([list(ids)], device=self._device)).logits
        return logits[0, -1]


class _Passes:
    """A streamer that keeps what it is handed; assisted generation hands over a pass at a time."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, ...]] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(tuple(value.flatten().tolist()))

    def end(self) -> None:
        pass
