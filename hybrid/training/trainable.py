"""`Trainable`: a transformers model to be trained, whole or through PEFT, under explicit masks.

It knows no recipe: no loss, no noise, no data. Next: hybrid/training/joint/recipe.py.
"""

from __future__ import annotations

import copy
import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.checkpoint import eos_token_ids, read_json, refuse_foreign_code
from hybrid.models.pretrained import load_pretrained
from hybrid.models.store import public_name, resolve
from hybrid.models.tokenizer import Tokenizer, load_tokenizer
from hybrid.training import masks

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Low-rank updates instead of a full fine-tune.

    Attributes:
        rank: r.
        alpha: scale of the updates is alpha / rank.
        targets: names of the linear layers ("q_proj", ...); none is all of them but the head.
        seed: of the initial A matrices; B starts at zero.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    seed: int = 0


class Trainable(nn.Module):
    """The model under training.

    It always runs in eval mode: with dropout, the teacher and the causal half of a pass would not
    be the model that decodes.

    Attributes:
        model: the transformers model, or PEFT's around it.
        path: the folder it was loaded from.
        name: what files that are passed on call it, never a path.
        tokenizer: None where the folder has none.
        vocab_size: rows of the embedding.
        max_length: longest sequence; a sliding window counts, for an explicit mask replaces it.
        eos_token_ids: as generation takes them.
    """

    def __init__(self, model: Any, path: Path, name: str, frozen: Any = None) -> None:
        """Wrap a loaded model; `frozen` is its copy for `teacher`, unless the model is PEFT's."""
        super().__init__()
        self.model = model.eval()
        # In a tuple, because a submodule's parameters would reach optimiser and checkpoints.
        self._frozen = (frozen,)
        self.path, self.name = path, name
        self.tokenizer: Tokenizer | None = load_tokenizer(path)
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.max_length = _max_length(config)
        self.eos_token_ids = eos_token_ids(
            model.generation_config.to_dict() if model.generation_config else {}, config.to_dict()
        )
        self._takes_logits_to_keep = (
            "logits_to_keep" in inspect.signature(_base(model).forward).parameters
        )

    def train(self, mode: bool = True) -> Trainable:
        """Set the mode of this module; the model stays in eval mode."""
        super().train(mode)
        self.model.eval()
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def is_lora(self) -> bool:
        """Whether low-rank updates are trained instead of the weights."""
        return _base(self.model) is not self.model

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, keep: Tensor | None = None
    ) -> Tensor:
        """Run tokens at any positions under any mask.

        Args:
            ids: [B, T].
            positions: [B, T] or [T], for the rotary embedding.
            mask: [T, T] or [B, T, T] boolean, True where a query sees a key; no empty rows.
            keep: [R] indices into T; only their logits are computed. None keeps all.

        Returns:
            [B, T or R, V] logits.
        """
        return self._run(self.model, ids, positions, mask, keep)

    @torch.no_grad()
    def teacher(
        self, ids: Tensor, positions: Tensor, mask: Tensor, keep: Tensor | None = None
    ) -> Tensor:
        """Return the logits of the model as it was before training; see `forward`.

        Raises:
            ConfigError: a full fine-tune that was loaded without `keep_teacher`.
        """
        if self.is_lora:
            with self.model.disable_adapter():
                return self._run(self.model, ids, positions, mask, keep)
        (frozen,) = self._frozen
        if frozen is None:
            raise ConfigError(
                "teacher: a full fine-tune changes the weights that the teacher needs. "
                "Load it with keep_teacher=True, or train low-rank updates."
            )
        return self._run(frozen, ids, positions, mask, keep)

    def _run(
        self, model: Any, ids: Tensor, positions: Tensor, mask: Tensor, keep: Tensor | None
    ) -> Tensor:
        batch, length = ids.shape
        mask = mask[:, None] if mask.ndim == 3 else mask.expand(batch, 1, length, length)
        kwargs = {"logits_to_keep": keep} if keep is not None and self._takes_logits_to_keep else {}
        logits: Tensor = model(
            input_ids=ids,
            position_ids=positions.expand(batch, length),
            attention_mask=mask,
            use_cache=False,
            **kwargs,
        ).logits
        return logits if keep is None or kwargs else logits[:, keep]

    def save(
        self,
        folder: Path,
        extra_config: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        merge: bool = True,
        card: str | None = None,
    ) -> None:
        """Write a Hugging Face folder, with the tokenizer; it appears whole or not at all.

        Args:
            folder: replaced if it exists.
            extra_config: more fields for config.json of a checkpoint.
            dtype: of the weights on disk.
            merge: add low-rank updates to the weights; False writes them as a PEFT adapter, whose
                extra fields are the caller's to keep. No matter for a full fine-tune.
            card: README.md.

        Raises:
            CheckpointError: it cannot be written; what was there before is intact.
        """
        self.zero_grad(set_to_none=True)  # their memory is better used now
        model = _for_disk(self.model, dtype, updates_alone=self.is_lora and not merge)
        copied, options = list(_TOKENIZER_FILES), {}
        if model is _base(model):
            model.config.update({**(extra_config or {}), "dtype": dtype})
            # transformers refuses to write some settings that checkpoints come with: copy the file.
            model.generation_config = GenerationConfig()
            copied.append(_GENERATION)
        else:
            model.peft_config["default"].base_model_name_or_path = self.name
            options["save_embedding_layers"] = False  # "auto" would ask a hub about the name
        with _replacing_folder(folder) as part:
            model.save_pretrained(part, **options)
            (part / _GENERATION).unlink(missing_ok=True)
            for file in (file for pattern in copied for file in self.path.glob(pattern)):
                shutil.copyfile(file, part / file.name)
            if card is not None:
                (part / "README.md").write_text(card, encoding="utf-8")


def load_trainable(
    model: str | Path,
    *,
    lora: LoraOptions | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    keep_teacher: bool = False,
) -> Trainable:
    """Load a model for training.

    Args:
        model: "default" or a GGUF file (both dequantised), a Hugging Face folder, or a hub id.
        lora: train low-rank updates; None trains all weights.
        device: where to.
        dtype: of the weights.
        keep_teacher: keep a frozen copy for `Trainable.teacher`; low-rank updates need none.

    Raises:
        CheckpointError: it cannot be found, read or matched.
        ConfigError: packed weights, a model that does not follow an explicit mask, or unknown
            `lora.targets`.
    """
    path = resolve(model, "float32" if dtype == torch.float32 else "bfloat16")
    base = _load(path, dtype).to(device)
    frozen = None
    if lora is not None:
        base = _with_lora(base, lora)
    elif keep_teacher:
        frozen = copy.deepcopy(base).requires_grad_(False).eval()
    trainable = Trainable(base, path, public_name(str(model)), frozen)
    _check_masks(trainable)
    return trainable


def _load(path: Path, dtype: torch.dtype) -> Any:
    config = read_json(path / "config.json")
    refuse_foreign_code(config, path / "config.json")
    if config.get("quantization_config"):
        raise ConfigError(
            f"model: {path} has packed weights, expected dense ones. Train on the same model in "
            "bfloat16 or float32."
        )
    # Of its attentions the one that takes a boolean mask.
    return load_pretrained("AutoModelForCausalLM", path, dtype, attn_implementation="sdpa")


def _with_lora(model: Any, lora: LoraOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        try:
            return get_peft_model(model, options)
        except ValueError as error:
            names = {n.rpartition(".")[2] for n, m in model.named_modules() if _is_linear(m)}
            raise ConfigError(
                f"targets: got {list(lora.targets)}, expected names of linear layers: "
                f"{', '.join(sorted(names))}."
            ) from error


@torch.no_grad()
def _for_disk(model: Any, dtype: torch.dtype, *, updates_alone: bool) -> Any:
    """Return a copy of the model with other weights: on the CPU, in `dtype`, updates merged.

    Tensor by tensor, for there may be no room for a second model; the first stays as it is.

    Args:
        model: transformers' or PEFT's.
        dtype: of the copy.
        updates_alone: merge nothing, and share the weights under the updates with the copy.
    """
    memo: dict[int, Any] = {}  # what deepcopy takes for a tensor instead of copying it
    if not updates_alone:
        for module in model.modules():
            if hasattr(module, "get_delta_weight"):
                weight = module.get_base_layer().weight
                merged = weight.cpu() + module.get_delta_weight("default").cpu()
                memo[id(weight)] = nn.Parameter(merged.to(dtype), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("cpu", dtype if buffer.is_floating_point() else None)
    for weight in model.parameters():
        if updates_alone and not weight.requires_grad:
            memo[id(weight)] = weight
        elif id(weight) not in memo:
            memo[id(weight)] = nn.Parameter(weight.to("cpu", dtype), requires_grad=False)
    copied = copy.deepcopy(model, memo)
    return copied if updates_alone or copied is _base(copied) else copied.unload()


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _base(model: Any) -> Any:
    """Return the transformers model inside PEFT's, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _max_length(config: Any) -> int:
    limits = [getattr(config, "max_position_embeddings", None) or 2**31 - 1]
    layers = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) and (
        layers is None or "sliding_attention" in layers
    ):
        limits.append(config.sliding_window)
    return min(limits)


@torch.no_grad()
def _check_masks(trainable: Trainable) -> None:
    """Refuse a model that computes something else than the mask says (recurrent ones, say)."""
    what = type(_base(trainable.model)).__name__
    if "position_ids" not in inspect.signature(_base(trainable.model).forward).parameters:
        raise ConfigError(f"model: {what} takes no position_ids, expected a rotary transformer.")
    ids = torch.tensor([[0, 1], [0, 2]], device=trainable.device)
    positions = torch.arange(2, device=trainable.device)
    changes = []  # of what position 0 says, by the token at position 1
    for mask in (masks.causal(2), masks.full(2)):
        first = trainable(ids, positions, mask.to(trainable.device))[:, 0]
        changes.append(float((first[0] - first[1]).abs().max()))
    unseen, seen = changes
    if not seen > 10 * unseen:  # not 0: the rows of a batch may be rounded differently
        raise ConfigError(
            f"model: {what} does not follow an explicit attention mask, expected a transformer "
            "with full attention (Llama, Qwen, Mistral, ...)."
        )


@contextmanager
def _replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; it takes the place of `folder` if the block ends without an error."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as building:
            part, old = Path(building) / "new", Path(building) / "old"
            part.mkdir()
            yield part
            if folder.exists():
                folder.rename(old)
            try:
                part.rename(folder)
            except BaseException:
                if old.exists():
                    old.rename(folder)  # before it goes with the temporary folder
                raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}. What was there before is intact: free some "
            "space or mend the folder, and run the same command again."
        ) from error
