"""`DFlashAssistant`: a DFlash drafter as the assistant of transformers' own assisted generation.

`model.generate(ids, assistant_model=assistant, speculation_type="dflash")` drafts with it for any
target: transformers hands over the target's embeddings of anchor and masks, what the target
computed for the tokens that joined, and a cache. Next: hybrid/models/dflash.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybrid.errors import ConfigError
from hybrid.kernels.block_attention import block_attention
from hybrid.models.compat import given_cache
from hybrid.models.dflash import Attend, DFlashModel, DFlashSpec, additive_mask
from hybrid.models.dflash_files import dflash_config, dflash_spec, load_dflash, save_dflash
from hybrid.models.hf import HFBackbone


class DFlashAssistantConfig(PreTrainedConfig):  # type: ignore[misc]
    """What transformers reads of a drafter, and the drafter's own config.json.

    Attributes:
        drafter: contents of config.json in the layout of the method's authors.
        block_size: the anchor and the masks behind it.
        mask_token_id: id in the target's embedding that stands for a masked position.
        target_layer_ids: layers of the target whose outputs are the features; the first is 0.
        num_hidden_layers: of the drafter.
        layer_types: of the cache that transformers makes: it keeps everything, and the drafter's
            masks hide what lies outside a window.
    """

    model_type = "hybrid_dflash_assistant"

    def __init__(self, drafter: dict[str, Any] | None = None, **fields: Any) -> None:
        """Read `drafter`; without one this is a config of nothing, which transformers asks for."""
        self.drafter = drafter or {}
        if drafter:
            spec = dflash_spec(drafter)
            self.hidden_size, self.vocab_size = spec.hidden_size, spec.vocab_size
            self.block_size, self.mask_token_id = spec.block_size, spec.mask_token_id
            self.target_layer_ids = list(spec.target_layer_ids)
            self.num_hidden_layers = spec.num_layers
            self.layer_types = ["full_attention"] * spec.num_layers
        super().__init__(**fields)


class DFlashAssistant(PreTrainedModel):  # type: ignore[misc]
    """A `DFlashModel` that transformers calls; its state is in the cache that it is given.

    Attributes:
        network: the drafter.
    """

    config_class = DFlashAssistantConfig
    main_input_name = "noise_embeds"
    _supports_sdpa = True

    def __init__(self, config: DFlashAssistantConfig) -> None:
        """Create random weights; `from_pretrained` is the usual way."""
        super().__init__(config)
        self.network = DFlashModel(dflash_spec(config.drafter))
        self.post_init()

    @classmethod
    def wrap(cls, network: DFlashModel) -> DFlashAssistant:
        """Return an assistant around a network, which is not copied."""
        dtype = network.fc.weight.dtype
        config = DFlashAssistantConfig(dflash_config(network.spec, dtype), dtype=dtype)
        with torch.device("meta"):
            assistant = cls(config)
        assistant.network = network
        return assistant.eval()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        target: PreTrainedModel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DFlashAssistant:
        """Read a drafter's folder in the layout of z-lab, transformers or speculators.

        Args:
            path: the folder.
            target: the model that it will draft for. It is checked against it, and gets its device
                and dtype.
            device: without a target.
            dtype: without a target.

        Raises:
            CheckpointError: see `load_dflash`; or the target is another than it was made for.
            ConfigError: a feature is the target's last layer, which engines read differently; or
                the target is no model.
        """
        if target is not None:
            if not isinstance(target, PreTrainedModel):
                raise ConfigError(
                    f"target: got {type(target).__name__}, expected a model of transformers. Load "
                    "it first: target=AutoModelForCausalLM.from_pretrained(...)."
                )
            device, dtype = target.device, target.dtype
        network = load_dflash(path, device=device, dtype=dtype)
        if target is not None:
            network.spec.check_target(HFBackbone(target))
        return cls.wrap(network)

    def __getattr__(self, name: str) -> Any:
        """Say what is missing where transformers takes this for a model that writes text itself."""
        if name == "generation_config":
            raise AttributeError(
                "DFlashAssistant has no generation_config: it drafts for another model alone. "
                'Add speculation_type="dflash" to generate(..., assistant_model=...).'
            )
        return super().__getattr__(name)

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write the layout of the method's authors, which `from_pretrained` and others load.

        Args:
            path: folder, created if need be.
            **options: of transformers; none is heeded, for the files are a drafter's, not ours.

        Raises:
            CheckpointError: a file cannot be written.
        """
        save_dflash(Path(path), self.network, self.dtype)

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        **arguments: Any,
    ) -> BaseModelOutput:
        """Draft a block.

        Args:
            noise_embeds: [1, block_size, C] the target's embeddings of the anchor and the masks.
            context_hidden_states: [1, T, F C] features of the T tokens that joined since the last
                call, side by side.
            position_ids: [1, T + block_size] of both.
            attention_mask: [1, S + T + block_size] with S tokens in the cache, 0 for padding; None
                without any.
            **arguments: the cache, under the name that this transformers has for it.

        Returns:
            `last_hidden_state` [1, block_size, C] for the target's head, in the target's dtype.

        Raises:
            ConfigError: no cache, or a target of another width.
        """
        spec, cache = self.network.spec, given_cache(arguments)
        _check_widths(spec, noise_embeds, context_hidden_states)
        if cache is None:
            raise ConfigError(
                "DFlashAssistant: got no cache, expected transformers' DFlashCache. Call it by "
                'model.generate(ids, assistant_model=..., speculation_type="dflash").'
            )
        num_new = context_hidden_states.shape[1]
        positions = position_ids[0]
        context = self.network.context(context_hidden_states[0], positions[:num_new])
        attend = self._attend(cache, context, noise_embeds.shape[1], attention_mask)
        x = self.network(noise_embeds[0], positions[num_new:], attend)
        return BaseModelOutput(last_hidden_state=x[None].to(noise_embeds.dtype))

    def _attend(
        self, cache: Any, context: Tensor, width: int, attention_mask: Tensor | None
    ) -> Attend:
        """Return attention of the block to all that the cache holds, and to the block itself.

        The block's keys go into the cache too; transformers crops them before the next call.
        """
        spec = self.network.spec
        length = cache.get_seq_length() + context.shape[3] + width
        real = torch.ones(length, dtype=torch.bool, device=context.device)
        if attention_mask is not None:
            real = attention_mask[0, -length:].bool()
        places = real.cumsum(dim=0)
        distances = places[-width:, None] - places
        masks = {
            window: additive_mask(
                real & (distances < (length if window is None else window)), spec, context.dtype
            )
            for window in set(spec.windows)
        }

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = torch.stack([key, value]).transpose(1, 2)
            keys, values = torch.cat([context[layer], own], dim=2).unsqueeze(1)
            keys, values = cache.update(keys, values, layer)
            return block_attention(query, keys[0], values[0], masks[spec.windows[layer]])

        return attend


def _check_widths(spec: DFlashSpec, embeds: Tensor, features: Tensor) -> None:
    got = embeds.shape[-1], features.shape[-1]
    expected = spec.hidden_size, spec.hidden_size * len(spec.target_layer_ids)
    if got != expected:
        raise ConfigError(
            f"DFlashAssistant: got embeddings of size {got[0]} and features of size {got[1]}, "
            f"expected {expected[0]} and {expected[1]}. Give the drafter that belongs to this "
            "target; from_pretrained(path, target=model) checks it."
        )
