"""Which backbone decodes for a model of transformers, over that model's own tensors.

The native backbone where it computes what the model's own code computes: it runs a batch at once,
and diffusion drafts need it. The model itself everywhere else. Next: hybrid/plug/rows.py.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from hybrid.errors import CheckpointError
from hybrid.models.families import spec_from_config, why_not_native
from hybrid.models.hf import HFBackbone
from hybrid.models.transformer import NativeBackbone

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backbone_of(model: PreTrainedModel) -> tuple[NativeBackbone | HFBackbone, str | None]:
    """Return the backbone of a model, and why it is not the native one, None if it is.

    The model keeps its tensors, its mode and its code; no weight is copied.

    Raises:
        ConfigError: its forward takes no cache.
    """
    reason = _why_not_native(model) or _why_not_as_built(model)
    if reason is None:
        try:
            return _native(model), None
        except CheckpointError as error:  # tensors by other names, or of other shapes
            reason = str(error)
    modes = [(module, module.training) for module in model.modules()]
    backbone = HFBackbone(model)
    for module, mode in modes:
        module.training = mode
    return backbone, reason


def state_of(model: PreTrainedModel) -> Hashable:
    """Return what a backbone is built from: another value asks for another one."""
    tensors = (*model.parameters(), *model.buffers())
    kinds = tuple(type(module) for module in model.modules())
    return _why_not_native(model), kinds, tuple(tensor.data_ptr() for tensor in tensors)


def _native(model: PreTrainedModel) -> NativeBackbone:
    """Return the native backbone over a model's tensors, its frequencies of rotation among them.

    `model.to(torch.bfloat16)` rounds those too; the model then rotates by the rounded ones.
    """
    spec, weights = spec_from_config(model.config.to_dict()), dict(model.state_dict())
    device, dtype = model.device, model.dtype
    backbone = NativeBackbone(spec, weights, device=device, dtype=dtype, share=True)
    backbone.rope.take(model.get_decoder().rotary_emb.inv_freq)
    return backbone


def _why_not_native(model: PreTrainedModel) -> str | None:
    """Return what the native backbone would not do that the model's own code does."""
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not a class of transformers"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or type(model).__name__} has a hook or a forward of its own"
    places = {(weight.device, weight.dtype) for weight in model.parameters()}
    if len(places) != 1 or model.device.type == "meta" or model.dtype not in _DTYPES:
        return "its weights are not of one dense dtype on one device"
    return why_not_native(model.config.to_dict())


def _why_not_as_built(model: PreTrainedModel) -> str | None:
    """Return where a model is not what its class makes of its config: a module, or a tensor."""
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(model.config))
    odd = _structure(model).items() ^ _structure(built).items()
    if not odd:
        return None
    name = min(name for name, _ in odd)
    return f"{name} is not as {type(model).__name__} builds it from its config"


def _structure(model: PreTrainedModel) -> dict[str, Hashable]:
    """Return the class of each module and the shape of each parameter, by name."""
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    return {**{name: type(module) for name, module in model.named_modules()}, **shapes}
