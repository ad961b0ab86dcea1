"""`Routing`: the router of a call, and what is kept from one call to the next.

Costs are measured once per drafter and batch, and go on being corrected; the monitor of a profile
remembers what it has seen. Next: hybrid/router/hybrid.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid.decode.timing import PassTimer
from hybrid.errors import ConfigError
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.fingerprint import folder_fingerprint, model_fingerprint
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone, Drafter, Router, can_carry
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel, StepShape, warm_up
from hybrid.router.hybrid import HybridRouter
from hybrid.router.monitor import RiskMonitor
from hybrid.router.profile import Profile
from hybrid.strategy import Hybrid
from hybrid.types import Mode, StepRecord

PROFILE = "profile.json"


class Routing:
    """Makes routers for one model, and remembers."""

    def __init__(
        self, backbone: Backbone, adapter: DiffusionAdapter | None, model_name: str
    ) -> None:
        """Keep the parts; nothing is measured yet."""
        self._backbone, self._adapter, self._model_name = backbone, adapter, model_name
        self._costs: dict[tuple[str, int, RouterConfig], CostModel] = {}
        self._monitors: dict[tuple[str, float], RiskMonitor] = {}

    def identity(self) -> tuple[str, str | None]:
        """Return what profiles call the model and the adapter."""
        folder = None if self._adapter is None else self._adapter.folder
        return (
            model_fingerprint(self._backbone, self._model_name),
            None if folder is None else folder_fingerprint(folder),
        )

    def router(
        self, settings: Hybrid, drafter: Drafter, count: int, params: SamplingParams, batch: int
    ) -> HybridRouter:
        """Return the router of a call.

        Args:
            settings: of the preset.
            drafter: what it routes.
            count: K, unless the settings say so.
            params: of the requests.
            batch: their number.

        Raises:
            ConfigError: a risk without a profile, or a profile for something else.
            CheckpointError: the profile cannot be read.
        """
        modes = settings.modes
        most = drafter.max_draft_tokens
        if not can_carry(drafter):
            modes = tuple(mode for mode in modes if mode not in {Mode.FUSED, Mode.ONE_PASS})
        config = RouterConfig(
            risk=settings.risk,
            cost=settings.cost,
            modes=modes,
            num_draft_tokens=count,
            num_slots=max(min(count + 1, most), 2),
        )
        profile = self._profile(settings, params)
        monitor = None
        if profile is not None and settings.is_monitored:
            monitor = self._monitors.get(_key_of(profile, config))
        elif profile is not None:
            # Neither the account nor the alarm of this one is ever exhausted.
            levels = len(profile.thresholds)
            monitor = RiskMonitor.start(config.risk, levels, delta=1e-99, allowance=1e9)
        return HybridRouter(config, self._measured(config, drafter, batch), profile, monitor)

    def remember(
        self, router: Router, batch: int, drafter: Drafter, history: Sequence[StepRecord]
    ) -> None:
        """Keep what a call has taught.

        Args:
            router: of the call; any that is no `HybridRouter` teaches nothing.
            batch: as for `router`.
            drafter: likewise.
            history: all records of the call.
        """
        if not isinstance(router, HybridRouter):
            return
        if router.costs is not None:
            self._costs[self._key(router.config, drafter, batch)] = router.costs
        profile, monitor = router.profile, router.monitor
        if profile is not None and monitor is not None and monitor.delta == profile.delta:
            key = _key_of(profile, router.config)
            self._monitors[key] = router.monitor_after(history)

    def _profile(self, settings: Hybrid, params: SamplingParams) -> Profile | None:
        profile = settings.profile
        if profile is None and self._adapter is not None and self._adapter.folder is not None:
            beside = self._adapter.folder / PROFILE
            profile = beside if beside.is_file() else None
        if isinstance(profile, Path):
            profile = Profile.load(profile)
        if settings.risk == 0:
            return None
        if profile is None:
            raise ConfigError(
                f"risk: got {settings.risk}, but {self._model_name} has no profile that says which "
                "tokens can be trusted. Make one with `hybrid calibrate` and give it as "
                "profile=FILE, or use risk=0."
            )
        profile.check(*self.identity(), params.temperature, settings.risk)
        return profile

    def _measured(self, config: RouterConfig, drafter: Drafter, batch: int) -> CostModel | None:
        if config.cost == "forwards" or config.risk > 0:
            return None
        key = self._key(config, drafter, batch)
        if key not in self._costs:
            timer = PassTimer(self._backbone, drafter)
            slots = config.group_size

            def measure(shape: StepShape) -> float:
                ms = timer.target_ms(shape.rows, shape.width, shape.groups, slots)
                if shape.drafting:
                    ms += timer.draft_ms(shape.drafting, config.num_draft_tokens)
                return ms

            most = 0 if not config.carrying_modes else config.num_draft_tokens + 1
            self._costs[key] = warm_up(measure, batch, config.num_draft_tokens, most)
        return self._costs[key]

    def _key(
        self, config: RouterConfig, drafter: Drafter, batch: int
    ) -> tuple[str, int, RouterConfig]:
        return drafter.name, batch, config


def _key_of(profile: Profile, config: RouterConfig) -> tuple[str, float]:
    return profile.model_dump_json(), config.risk
