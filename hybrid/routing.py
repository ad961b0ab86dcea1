"""`Routing`: the router of a call, and what is kept from one call to the next.

Costs are measured once per drafter and batch, and go on being corrected; the monitor of a profile
remembers what it has seen. Next: hybrid/router/hybrid.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid.decode.loop import run
from hybrid.decode.step import Engine
from hybrid.decode.timing import PassTimer
from hybrid.errors import ConfigError
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.fingerprint import folder_fingerprint, model_fingerprint
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone, Drafter, can_carry
from hybrid.router.config import ROUTED, RouterConfig
from hybrid.router.cost import CostModel, StepShape, warm_up
from hybrid.router.hybrid import HybridRouter
from hybrid.router.monitor import RiskMonitor
from hybrid.router.profile import Profile
from hybrid.router.record import RunHeader, write_run
from hybrid.strategy import Hybrid
from hybrid.types import Mode, SequenceState, StepRecord

PROFILE = "profile.json"


class Routing:
    """Makes routers for one model, and remembers."""

    def __init__(
        self, backbone: Backbone, adapter: DiffusionAdapter | None, model_name: str
    ) -> None:
        """Keep the parts; nothing is measured yet."""
        self._backbone, self._adapter, self._model_name = backbone, adapter, model_name
        self._costs: dict[tuple[str, int, RouterConfig], CostModel] = {}
        self._acceptance: dict[tuple[str, int, RouterConfig], dict[str, Any]] = {}
        self._monitors: dict[tuple[str, float], RiskMonitor] = {}

    @cached_property
    def identity(self) -> tuple[str, str | None]:
        """What profiles call the model and the adapter; neither changes once it is loaded."""
        folder = None if self._adapter is None else self._adapter.folder
        return (
            model_fingerprint(self._backbone, self._model_name),
            None if folder is None else folder_fingerprint(folder),
        )

    def router(
        self,
        settings: Hybrid,
        drafter: Drafter,
        asked: int | None,
        params: SamplingParams,
        batch: int,
    ) -> HybridRouter:
        """Return the router of a call.

        Args:
            settings: of the preset.
            drafter: what it routes.
            asked: K if somebody asked for one.
            params: of the requests.
            batch: their number.

        Raises:
            ConfigError: a risk without a profile, or a profile for something else.
            CheckpointError: the profile cannot be read.
        """
        profile = self._profile(settings, params)
        config = self.config(settings, drafter, asked)
        monitor = None
        if profile is not None and config.risk > 0:
            config = _as_calibrated(profile, config, settings, asked)
            monitor = self._monitors.get(_key_of(profile, config))
            if not settings.is_monitored:
                # Neither the account nor the alarm of this one is ever exhausted.
                levels = len(profile.thresholds)
                monitor = RiskMonitor.start(config.risk, levels, delta=1e-99, allowance=1e9)
        return HybridRouter(
            config,
            self._measured(config, drafter, batch),
            profile,
            monitor,
            self._acceptance.get(self._key(config, drafter, batch)),
        )

    def measure(self, drafter: Drafter, config: RouterConfig, batch: int = 1) -> CostModel:
        """Return what steps cost here, from a few passes that are timed now."""
        timer = PassTimer(self._backbone, drafter)

        def measure(shape: StepShape) -> float:
            ms = timer.target_ms(shape.rows, shape.width, shape.groups, config.group_size)
            if shape.drafting:
                ms += timer.draft_ms(shape.drafting, config.num_draft_tokens)
            return ms

        most = config.num_draft_tokens + 1 if config.carrying_modes else 0
        look_ms = timer.look_ms(batch, config.num_draft_tokens)
        return warm_up(measure, batch, config.num_draft_tokens, most, look_ms)

    def run(
        self, engine: Engine, rows: list[SequenceState], strategy: str, record: Path | None
    ) -> Generator[StepRecord, None, None]:
        """Return the loop, which keeps what it teaches for the next call, also when it is closed.

        Args:
            engine: the parts of the call.
            rows: not yet prefilled.
            strategy: its name, for the record.
            record: file for the run; None writes none.

        Raises:
            ConfigError: a record of a run that nobody routes.
            CheckpointError: the record cannot be written.
        """
        router = engine.router
        if isinstance(router, HybridRouter):
            return self._run(engine, rows, router, strategy, record)
        if record is not None:
            raise ConfigError(
                f"record: {self._model_name} decodes token by token, so there is no decision to "
                "keep. Leave it out."
            )
        return run(engine, rows)

    def _run(
        self,
        engine: Engine,
        rows: list[SequenceState],
        router: HybridRouter,
        strategy: str,
        record: Path | None,
    ) -> Generator[StepRecord, None, None]:
        try:
            yield from run(engine, rows)
        finally:
            self._remember(router, len(rows), engine.drafter, engine.history)
            if record is not None:
                header = RunHeader.of(rows, router, model=self._model_name, strategy=strategy)
                write_run(record, header, engine.history)

    def _remember(
        self, router: HybridRouter, batch: int, drafter: Drafter, history: Sequence[StepRecord]
    ) -> None:
        key = self._key(router.config, drafter, batch)
        if router.costs is not None and router.acceptance is not None:
            self._costs[key], self._acceptance[key] = router.costs, router.acceptance
        profile, monitor = router.profile, router.monitor
        if profile is not None and monitor is not None and monitor.delta == profile.delta:
            known = _key_of(profile, router.config)
            # Streams that interleave began with the same one: each adds what it has seen.
            monitor = self._monitors.get(known, monitor)
            self._monitors[known] = router.monitor_after(monitor, history)

    def config(self, settings: Hybrid, drafter: Drafter, asked: int | None) -> RouterConfig:
        """Return the settings of a router; see `router`."""
        cost, most = settings.cost or "measured", drafter.max_draft_tokens
        modes = ROUTED if settings.modes is None else settings.modes
        if most == 0:
            modes = (Mode.AR,)
        elif not can_carry(drafter):
            modes = tuple(mode for mode in modes if mode not in {Mode.FUSED, Mode.ONE_PASS})
        # Where every pass costs the same, a wider one is never worse.
        preferred = most if cost == "forwards" else getattr(drafter, "preferred_draft_tokens", most)
        count = asked or preferred or 1
        return RouterConfig(
            risk=settings.risk,
            cost=cost,
            modes=modes,
            num_draft_tokens=count,
            num_slots=max(min(count + 1, getattr(drafter, "max_slots", most)), 2),
        )

    def _profile(self, settings: Hybrid, params: SamplingParams) -> Profile | None:
        """Return the profile that is asked for; at risk 0 it gives the first counts, if it fits."""
        profile = settings.profile
        if profile is None and self._adapter is not None and self._adapter.folder is not None:
            beside = self._adapter.folder / PROFILE
            profile = beside if beside.is_file() else None
        if isinstance(profile, Path):
            profile = Profile.load(profile)
        if settings.risk == 0:
            fits = profile is not None and profile.fits(*self.identity, params.temperature)
            return profile if fits else None
        if profile is None:
            raise ConfigError(
                f"risk: got {settings.risk}, but {self._model_name} has no profile that says which "
                "tokens can be trusted. Make one with `hybrid calibrate` and give it as "
                "profile=FILE, or use risk=0."
            )
        profile.check(*self.identity, params.temperature, settings.risk)
        return profile

    def _measured(self, config: RouterConfig, drafter: Drafter, batch: int) -> CostModel | None:
        if config.cost == "forwards" or config.risk > 0:
            return None
        key = self._key(config, drafter, batch)
        if key not in self._costs:
            try:
                self._costs[key] = self.measure(drafter, config, batch)
            except Exception:  # noqa: BLE001 - what fails here fails in a step, and is told there
                self._costs[key] = CostModel.guess()
        return self._costs[key]

    def _key(
        self, config: RouterConfig, drafter: Drafter, batch: int
    ) -> tuple[str, int, RouterConfig]:
        return drafter.name, batch, config


def _key_of(profile: Profile, config: RouterConfig) -> tuple[str, float]:
    return profile.model_dump_json(), config.risk


def _as_calibrated(
    profile: Profile, config: RouterConfig, settings: Hybrid, asked: int | None
) -> RouterConfig:
    """Return the settings that a profile was calibrated with; the promise holds for no others.

    Raises:
        ConfigError: somebody asks for others.
    """
    if profile.router is None:
        return config
    calibrated = RouterConfig(**{**profile.router, "risk": config.risk})
    wanted = {"cost": settings.cost, "modes": settings.modes, "num_draft_tokens": asked}
    for name, value in wanted.items():
        own = getattr(calibrated, name)
        if value is not None and value != own:
            raise ConfigError(
                f"{name}: got {value}, expected {own}, which the profile was calibrated with. "
                "Leave it out, calibrate with it, or use risk=0."
            )
    return calibrated
