"""`Parts`: from names to the drafter, verifier and router of a request. It checks what it is given.

Next: hybrid/decoder.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from hybrid import registry
from hybrid.config import Config
from hybrid.decode.step import Engine
from hybrid.decode.stopping import StopRule
from hybrid.errors import ConfigError
from hybrid.memory import require_memory
from hybrid.models.adapter import DiffusionAdapter, own_drafts
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone, Cache, Drafter, Router, Verifier, can_carry
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel
from hybrid.router.fixed import FixedRouter
from hybrid.routing import Routing
from hybrid.strategy import Hybrid, Strategy, VerifiedPreset
from hybrid.types import Context, Mode, SequenceState

_MODES = {"two-pass": Mode.SPECULATIVE, "fused": Mode.FUSED, "one-pass": Mode.ONE_PASS}


class Parts:
    """What a decoder drafts and verifies with.

    Attributes:
        routing: makes the routers of strategy "hybrid".
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: DiffusionAdapter | None,
        drafter: str | Path | Drafter | None,
        verifier: str | Verifier,
        num_draft_tokens: int | None,
        model_name: str,
    ) -> None:
        """Check everything now, not at the first request; see `HybridDecoder`.

        Raises:
            ConfigError: an unknown name, self-diffusion without an adapter, or K < 1.
        """
        self._backbone, self._adapter, self._model_name = backbone, adapter, model_name
        if num_draft_tokens is not None and not _is_count(num_draft_tokens):
            raise ConfigError(
                f"num_draft_tokens: got {num_draft_tokens!r}, expected an integer of at least 1. "
                "To decode without a draft use strategy='ar'."
            )
        self._num_draft_tokens = num_draft_tokens
        self.routing = Routing(backbone, adapter, model_name)
        if drafter is None:
            drafter = _usual_drafter(backbone, adapter)
        if isinstance(drafter, str) and drafter.startswith("dflash:"):
            drafter = Path(drafter.removeprefix("dflash:"))
        if isinstance(drafter, Path):
            load = registry.load("drafter", "dflash").from_pretrained
            self._drafter: str | Drafter = load(backbone, drafter)
        else:
            self._drafter = drafter
        self._check_count(self.drafter(), num_draft_tokens, "num_draft_tokens")
        self._verifier = verifier
        if isinstance(verifier, str):
            if verifier != "auto":
                registry.load("verifier", verifier)
        elif not isinstance(verifier, Verifier):
            raise ConfigError(
                f"verifier: got {type(verifier).__name__}, expected a name or a Verifier "
                "(hybrid/protocols.py)."
            )

    @property
    def drafter_name(self) -> str:
        """Of the decoder's own drafter."""
        return self._drafter if isinstance(self._drafter, str) else self._drafter.name

    @property
    def verifier_name(self) -> str:
        """Or "auto"."""
        return self._verifier if isinstance(self._verifier, str) else self._verifier.name

    def barred(self, settings: VerifiedPreset) -> tuple[int, ...]:
        """Return the ids that are no answer: the model's mask token.

        The dflash preset bars that of its drafter too, an ordinary id to the target: so does its
        reference.
        """
        known = [self._backbone.mask_token_id]
        if settings.needs is not None:
            known.append(getattr(self._drafter, "mask_token_id", None))
        return tuple(token for token in known if token is not None)

    def drafter(
        self,
        name: str | None = None,
        *,
        block_size: int | None = None,
        threshold: float = 0.0,
        may_stop: bool = True,
    ) -> Drafter:
        """Return the drafter of a name, by default the decoder's own.

        Args:
            name: see `hybrid list drafters`.
            block_size: see `SelfDiffusionDrafter`; others take no notice.
            threshold: likewise.
            may_stop: a draft may end early by the drafter's own rule.

        Raises:
            ConfigError: unknown, or it lacks what it needs.
        """
        drafter = self._drafter if name is None else name
        if not isinstance(drafter, str):
            if not isinstance(drafter, Drafter):
                raise ConfigError(
                    f"drafter: got {type(drafter).__name__}, expected a name or a Drafter "
                    "(hybrid/protocols.py)."
                )
            return drafter
        make = registry.load("drafter", drafter)
        if drafter == "ngram" and self._num_draft_tokens is not None:
            return make(max_draft_tokens=self._num_draft_tokens)
        # Who asks for K tokens gets K; the adapter's own K may end earlier.
        stops_early = may_stop and self._num_draft_tokens is None
        if drafter == "self-diffusion":
            return make(
                self._backbone,
                self._adapter or self._own_drafts,
                block_size=block_size,
                threshold=threshold,
                stops_early=stops_early,
            )
        if drafter == "combined":
            if self._adapter is None:
                raise ConfigError(
                    f"drafter 'combined': {self._model_name} has no diffusion adapter. Give "
                    "adapter=FOLDER (see `hybrid train self-diffusion`) or use drafter='ngram'."
                )
            return make(self._backbone, self._adapter, stops_early=stops_early)
        if drafter == "dflash":
            raise ConfigError(
                "drafter 'dflash': expected its folder, drafter='dflash:FOLDER' (see `hybrid train "
                "dflash`)."
            )
        return make()

    @cached_property
    def _own_drafts(self) -> DiffusionAdapter:
        """Of a model that fills masks by itself, made once: recorded passes are known by it."""
        return own_drafts(self._backbone)

    def verifier(self, params: SamplingParams) -> Verifier:
        """Return the verifier of a request.

        Raises:
            ConfigError: it cannot sample, and the request asks for it.
        """
        if not isinstance(self._verifier, str):
            return self._verifier
        name = self._verifier
        if name == "greedy" and not params.is_greedy:
            raise ConfigError(
                f"verifier 'greedy': got temperature {params.temperature}, expected 0. "
                "Use verifier='rejection' or 'block' to sample, or leave it at 'auto'."
            )
        if name == "auto":
            name = "greedy" if params.is_greedy else "rejection"
        return registry.load("verifier", name)()

    def of_preset(
        self, name: str, settings: VerifiedPreset, params: SamplingParams, batch: int
    ) -> tuple[Drafter, Router]:
        """Return what a preset drafts with, and what decides how much.

        Args:
            name: of the preset.
            settings: of the preset.
            params: of the requests.
            batch: their number.

        Raises:
            ConfigError: the drafter cannot do what the preset asks for.
        """
        if settings.drafter != "none" and not getattr(self._backbone, "supports_rollback", True):
            warnings.warn(
                f"{self._model_name} keeps a state that cannot be rolled back: "
                f"strategy {name!r} decodes token by token.",
                RuntimeWarning,
                stacklevel=6,
            )
            return self.drafter("none"), FixedRouter(0)
        if settings.drafter == "none" or settings.num_draft_tokens == 0:
            return self.drafter("none"), FixedRouter(0)
        if settings.needs is not None and self.drafter_name != settings.needs:
            raise ConfigError(
                f"strategy {name!r}: this decoder drafts with {self.drafter_name!r}, expected "
                f"{settings.needs!r}. Give drafter='{settings.needs}:FOLDER'."
            )
        size = getattr(settings, "block_size", None)
        threshold = getattr(settings, "threshold", 0.0)
        is_routed = isinstance(settings, Hybrid)  # then the router alone ends drafts
        drafter = self.drafter(
            settings.drafter, block_size=size, threshold=threshold, may_stop=not is_routed
        )
        if threshold and drafter.name != "self-diffusion":
            raise ConfigError(
                f"threshold: got {threshold}, but drafter {drafter.name!r} drafts in one pass. "
                "Leave it out, or use drafter='self-diffusion'."
            )
        self._check_count(drafter, settings.num_draft_tokens, "block_size - 1")
        preferred: int = getattr(drafter, "preferred_draft_tokens", drafter.max_draft_tokens)
        asked = settings.num_draft_tokens or self._num_draft_tokens
        if isinstance(settings, Hybrid):
            return drafter, self.routing.router(settings, drafter, asked, params, batch)
        count = asked or preferred
        mode = _MODES[getattr(settings, "mode", "two-pass")]
        if mode != Mode.SPECULATIVE:
            self._require_carrying(drafter, name)
        return drafter, FixedRouter(count, mode)

    def engine(
        self,
        chosen: Strategy,
        params: SamplingParams,
        rows: Sequence[SequenceState],
        rules: Sequence[StopRule],
    ) -> Engine:
        """Return the engine of a call whose drafts the target verifies, its cache allocated.

        Args:
            chosen: a verified preset.
            params: of all rows.
            rows: not yet prefilled.
            rules: when each row ends.

        Raises:
            ConfigError: the drafter or the verifier cannot do what is asked for.
            CapacityError: the cache does not fit the memory.
        """
        settings = cast(VerifiedPreset, chosen.settings)
        drafter, router = self.of_preset(chosen.name, settings, params, len(rows))
        longest = max(len(row.tokens) for row in rows)
        width = 1 + drafter.max_draft_tokens + router.max_points * (router.num_slots + 1)
        return Engine(
            self._backbone,
            new_cache(self._backbone, len(rows), longest + params.max_new_tokens + width),
            drafter,
            self.verifier(params),
            router,
            rules={row.row: rule for row, rule in zip(rows, rules, strict=True)},
            barred=self.barred(settings),
        )

    def routed(self, settings: Config) -> tuple[RouterConfig, CostModel]:
        """Return the router's settings for those of preset "hybrid", and costs measured now.

        Raises:
            ConfigError: another preset.
        """
        if not isinstance(settings, Hybrid):
            raise ConfigError(f"got settings of {type(settings).__name__}, expected 'hybrid'.")
        drafter = self.drafter(block_size=settings.block_size, may_stop=False)
        asked = settings.num_draft_tokens or self._num_draft_tokens
        config = self.routing.config(settings, drafter, asked)
        return config, self.routing.measure(drafter, config)

    def _require_carrying(self, drafter: Drafter, name: str) -> None:
        if not can_carry(drafter):
            raise ConfigError(
                f"strategy {name!r}: drafter {drafter.name!r} cannot draft within a target pass, "
                "expected 'self-diffusion' or 'combined' with one pass per draft. Use "
                "mode=two-pass."
            )

    def _check_count(self, drafter: Drafter, count: int | None, what: str) -> None:
        most = drafter.max_draft_tokens
        if count is not None and 0 < most < count:
            raise ConfigError(
                f"{what}: got {count}, expected at most {most}, which is what drafter "
                f"{drafter.name!r} can propose."
            )


def new_cache(backbone: Backbone, batch: int, capacity: int) -> Cache:
    """Allocate a cache.

    Raises:
        CapacityError: it does not fit the memory.
    """
    idle = getattr(backbone, "idle_nbytes", 0)  # of earlier caches, freed if need be
    require_memory(
        backbone.cache_nbytes(batch, capacity) - idle,
        backbone.device,
        f"The KV cache for {batch} x {capacity} tokens",
    )
    return backbone.new_cache(batch, capacity)


def _usual_drafter(backbone: Backbone, adapter: DiffusionAdapter | None) -> str:
    # A model that was trained to fill masks beside its AR mode needs no adapter.
    fills_masks = backbone.mask_token_id is not None and backbone.block_size is not None
    if fills_masks and backbone.context == Context.CAUSAL and not backbone.logit_shift:
        return "self-diffusion"
    return "ngram" if adapter is None else "combined"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
