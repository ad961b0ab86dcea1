"""The commands that serve what was exported. Next: hybrid/export/export.py."""

from __future__ import annotations

import json
import shlex
from pathlib import Path


def vllm(folder: Path, target: str, num_draft_tokens: int) -> str:
    """Return the command that serves `target` in vLLM with a DFlash drafter."""
    config = {
        "method": "dflash",  # guessed only where the folder's path contains the word
        "model": str(folder),
        "num_speculative_tokens": num_draft_tokens,
    }
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])


def speculators(folder: Path) -> str:
    """Return the command that serves a speculator and the target that it names."""
    return shlex.join(["vllm", "serve", str(folder)])


def sglang(folder: Path, target: str) -> str:
    """Return the command that serves `target` in SGLang with a DFlash drafter."""
    return _sglang(target, "DFLASH", "--speculative-draft-model-path", str(folder))


def sglang_uno(folder: Path, target: str, num_draft_tokens: int) -> str:
    """Return the command that lets `target` draft for itself in SGLang, with a plain adapter."""
    draft = ("--speculative-num-draft-tokens", str(num_draft_tokens))
    return _sglang(target, "UNO", "--uno-lora-path", str(folder), *draft)


def _sglang(target: str, algorithm: str, *arguments: str) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    return shlex.join([*words, "--speculative-algorithm", algorithm, *arguments])


def transformers_drafter(folder: Path, target: str) -> str:
    """Return Python that generates with a DFlash drafter in transformers."""
    return f"""\
from transformers import AutoModelForCausalLM
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantModel

model = AutoModelForCausalLM.from_pretrained({target!r})
drafter = MuseGlimmerAssistantModel.from_pretrained({str(folder)!r})
model.generate(ids, assistant_model=drafter, speculation_type="dflash", max_new_tokens=64)"""


def peft_adapter(folder: Path, target: str) -> str:
    """Return Python that loads a plain adapter in PEFT."""
    return f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({target!r})
adapted = PeftModel.from_pretrained(model, {str(folder)!r})"""


def custom_generate(folder: Path) -> str:
    """Return Python that generates with a checkpoint that carries its drafter."""
    return f"""\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
model.generate(ids, max_new_tokens=64)"""
