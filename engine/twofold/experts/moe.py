"""Experts of a loaded model: packs them into the native store and builds their executor.

Decisions and compute are native (`MoeExecutor`); this module only builds the executor.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.types import PlacementCounts
from twofold.api.whole_file import whole_file
from twofold.blocks import ops
from twofold.experts.accelerator import AcceleratorChoice, ExpertDevice
from twofold.experts.cpu_cost import cpu_cost_model, machine_cost_model
from twofold.experts.dynamic_update import DynamicUpdate
from twofold.experts.output_changes import effective_plan
from twofold.experts.packing import pack_experts
from twofold.experts.pins import usable_slots
from twofold.experts.placement import Mask
from twofold.experts.profiles import UNCALIBRATED, MachineProfile, profile_of_devices
from twofold.experts.routing_record import RoutingRecord
from twofold.experts.slot_plan import DenseCost, MoeShape, SlotPlan
from twofold.experts.spread import ExpertSpread
from twofold.weights.weight_format import LayerExperts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Counts:
    """Counts of executors that have been replaced."""

    placements: Mapping[str, int] = field(default_factory=dict)
    scheduler: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: tuple[float, ...] = (0.0,) * 5
    expert_runs: int = 0

    def plus(self, executor: _core.MoeExecutor) -> _Counts:
        return _Counts(
            _added(self.placements, executor.counts()),
            self.scheduler_plus(executor),
            tuple(map(sum, zip(self.parts, executor.clock_parts(), strict=True))),
            self.expert_runs + int(executor.num_expert_runs),
        )

    def scheduler_plus(self, executor: _core.MoeExecutor) -> dict[str, dict[str, int]]:
        """Counts of the schedulers by group, of `executor`'s too."""
        counts = executor.scheduler_counts()
        return {group: _added(self.scheduler.get(group, {}), now) for group, now in counts.items()}


def _added(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count + before.get(name, 0) for name, count in now.items()}


class MoeRuntime:
    """The experts and their native executor. One per engine; the engine thread owns it.

    `experts` yields the experts of one MoE layer after the other; each is packed once, into the store. Or it is an
    already filled store. `progress` receives (layers done, bytes done, bytes in all). With `machine`, the result of
    `twofold calibrate` here, the CPU's layers are predicted before they run; without an accelerator that is a profile's
    only use.

    Raises:
        ConfigError: unknown policy or slots out of range.
        ModelLoadError: memory is short.
        CapacityError, KernelError: the device has no room, or failed.
    """

    def __init__(
        self,
        shape: MoeShape,
        experts: Iterable[LayerExperts] | _core.ExpertStore,
        pool: ops.ThreadPool,
        choice: AcceleratorChoice,
        slots: SlotPlan,
        dense_cost: DenseCost,
        progress: Callable[[int, int, int], None] | None = None,
        machine: MachineProfile | None = None,
        spread: ExpertSpread | None = None,
    ) -> None:
        self.choice = choice
        self.shape = shape
        self.pool = pool
        self.store = (
            experts
            if isinstance(experts, _core.ExpertStore)
            else pack_experts(shape, experts, pool, progress, spread)
        )
        self.expert_bytes: int = self.store.expert_bytes
        """Bytes of the largest expert, which a slot has room for."""
        self.accelerator: _core.DeviceAccelerator | None = None
        """Expert slots of a real device; None without one."""
        self._dense_cost, self._machine = dense_cost, machine
        self._earlier_counts = _Counts()
        self._saved_cache = b""
        self._begin_us = 0.0
        self._first_step = -1
        self._released: npt.NDArray[np.void] | None = None
        self._is_released = False
        profile = choice.profile or profile_of_devices(machine, choice.devices)
        curve = profile.cpu_curve(shape.format, shape.hidden, shape.intermediate, pool.num_threads)
        self.cost = machine_cost_model(profile, self.store, curve)
        """Cost model of a layer: of the chosen accelerator, or of this machine's or a shipped profile."""
        self.plan, self.output_changes = effective_plan(
            slots, shape.top_k, choice=choice, cost=self.cost, figures=profile.cost_figures, dense=dense_cost
        )
        self.executor = self._make(self.plan)
        """Runs the layers' experts. Replaced by `release` and `allocate`."""
        self.routing = RoutingRecord(lambda: self.executor.routing_counts)
        self.dynamic_update = DynamicUpdate(lambda: self.scheduler_counts()["dynamic_update"])
        self._place(self.plan)

    def _make(self, slots: SlotPlan) -> _core.MoeExecutor:
        shape, pool, choice, machine = self.shape, self.pool, self.choice, self._machine
        if choice.open_devices is not None:
            return self._on_devices(choice.open_devices(), slots)
        if choice.profile is None:
            curve = machine and machine.cpu_curve(
                shape.format, shape.hidden, shape.intermediate, pool.num_threads
            )
            return _core.MoeExecutor(
                pool,
                self.store,
                cpu_cost_model(curve, self.store.mean_expert_bytes) if curve else None,
                slots.num_deferred,
            )
        try:
            return _core.MoeExecutor.emulated(
                pool,
                self.store,
                cost=self.cost,
                config=slots.scheduler_config(shape),
                dense=self._dense_cost.native(),
                preload=slots.num_slots >= usable_slots(slots.devices, shape.num_layers, shape.num_experts),
                begin_us=self._begin_us,
                first_step=self._first_step,
            )
        except ValueError as error:
            raise ConfigError(f"accelerator {choice.label}: {error}") from error

    def _on_devices(self, devices: Sequence[ExpertDevice], slots: SlotPlan) -> _core.MoeExecutor:
        shape, pool, (device, *others) = self.shape, self.pool, devices
        if self._machine is None:
            _log.warning(
                "this machine is not calibrated: plans use the profile %s; run `twofold calibrate`",
                UNCALIBRATED,
            )
        elif others and not self._machine.joined:
            _log.warning(
                "all %d GPUs are planned with the figures of one, %s; calibrate each and give --machine-profile "
                "FIRST.json+SECOND.json",
                len(devices),
                self._machine.name,
            )
        cost = self.cost
        try:
            accelerator = device.accelerator(self.store, cost, slots.scheduler_config(shape), others)
            if accelerator.warning and self.store.mapped:
                _log.warning(
                    "experts are copied from their file, which cannot be pinned in place (%s)",
                    accelerator.warning,
                )
                del accelerator  # first: its slots take the room that the next ones need
                self.store = self.store.copied(pool)
                accelerator = device.accelerator(self.store, cost, slots.scheduler_config(shape), others)
        except ValueError as error:
            raise ConfigError(f"accelerator {self.choice.label}: {error}") from error
        except MemoryError as error:
            raise ModelLoadError(
                "there is not enough memory for a copy of the experts; load the model it was packed from instead"
            ) from error
        self.accelerator = accelerator
        if accelerator.warning:
            _log.warning("%s", accelerator.warning)
        everything = slots.num_slots >= usable_slots(slots.devices, shape.num_layers, shape.num_experts)
        return _core.MoeExecutor.on_device(
            pool, self.store, accelerator, preload=everything, first_step=self._first_step
        )

    # ---- resizing the slots at run time ------------------------------------------------------------------------------

    def release(self) -> None:
        """Free the slots' memory, between two steps. The cache's statistics, the clock and the counts stay. Until
        `allocate` the CPU computes all experts. Undrained events are lost, except that experts leave their slots. Safe
        to call twice."""
        if self._is_released or self.choice.kind == "none":
            return
        self.executor.idle()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache"
            self.executor.save_cache(str(path))
            self._saved_cache = path.read_bytes()
        self._earlier_counts = self._earlier_counts.plus(self.executor)
        self._begin_us = self.executor.virtual_now_us or 0.0
        enabled = self.executor.events_enabled
        self.executor.drain_events()
        self._first_step = self.executor.record_release() + 1
        self._released = self.executor.drain_events()["cache_event"]
        self.routing.save()
        self.executor = _core.MoeExecutor(self.pool, self.store, num_deferred=self.plan.num_deferred)
        self.executor.events_enabled = enabled
        self.routing.resume()
        self.accelerator = None
        self._is_released = True

    def allocate(self, num_slots: int, num_staging: int = -1) -> None:
        """Allocate `num_slots` slots after `release` and fill them with the most valuable experts. Under a static
        placement: with the previous ones, or, if the number of slots differs, with those of the strategy.

        Raises:
            ConfigError, CapacityError, KernelError: as the constructor; the state is as after `release`.
        """
        plan = replace(self.plan, num_slots=num_slots, num_staging=num_staging)
        executor = self._make(plan)
        executor.events_enabled = self.executor.events_enabled
        self.routing.save()
        is_other = plan.placement.is_static and num_slots != self.plan.num_slots
        self.executor, self.plan = executor, plan
        self.routing.resume()
        if is_other:
            self._place(plan)
        elif self._saved_cache:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "cache"
                path.write_bytes(self._saved_cache)
                self.executor.restore_cache(str(path))
        self._saved_cache, self._is_released = b"", False

    @property
    def device_slots(self) -> list[int]:
        """Expert slots of each device; empty without slots."""
        return self.plan.device_slots(self.shape) if self.num_slots else []

    def _place(self, plan: SlotPlan) -> None:
        mask = plan.mask(self.shape) if self.num_slots else None
        if mask is not None:
            self.place_experts(mask)

    def place_experts(self, mask: Mask) -> int:
        """Make slots hold exactly these experts, [layers, experts], between two steps. Returns the number of uploads.

        Raises:
            ConfigError: there are fewer slots; nothing has changed.
            KernelError: the device failed.
        """
        try:
            return int(self.executor.place_experts(mask.astype(np.uint8)))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def policy(self) -> str:
        """Cache policy; "static" if a strategy has fixed the placement."""
        return "static" if self.plan.placement.is_static else self.plan.policy

    def prompt_step_done(self) -> None:
        """Count the dynamic-update outcome of a finished step with prompt tokens, if dynamic update is on."""
        if not self.plan.dynamic_update_from:
            return
        reasons = {
            "no_accelerator": self.choice.kind == "none",
            "no_slots": self.num_slots == 0,
            "payback_places": not self.plan.placement.is_static,
            "all_resident": self.num_slots == self.shape.num_layers * self.shape.num_experts,
        }
        self.dynamic_update.step(next((reason for reason, holds in reasons.items() if holds), None))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin_step(
        self,
        step: int,
        requests: Sequence[int],
        positions: Sequence[int],
        generated: Sequence[bool] = (),
        verified: Sequence[bool] = (),
        pictures: Sequence[bool] = (),
        *,
        is_recorded: bool = True,
    ) -> None:
        """Describe the rows of the step's batch: each token's request, position, whether it was generated, whether it
        is a newest token or draft to be verified, and whether it has experts of pictures (empty: none is, or has).
        Only settings that change outputs depend on `generated`. is_recorded: False for a drafter's pass, whose routing
        is neither counted nor an event."""
        self.executor.begin_step(
            step,
            requests,
            positions,
            generated if self.plan.changes_outputs else (),
            verified,
            is_recorded,
            pictures,
        )

    @property
    def virtual_now_us(self) -> float | None:
        """Time of an emulated accelerator's virtual clock; None in real time."""
        now: float | None = self.executor.virtual_now_us
        return self._begin_us if now is None and self.choice.clock == "virtual" else now

    def clock_parts(self) -> tuple[float, float, float, float, float]:
        """Microseconds of all steps by part: dense, experts on the GPU, on the CPU, the link, the head.

        On a virtual clock their sum is the time that passed in steps. In real time they are a device's measurements of
        its layers (dense: between them); zeros without one.
        """
        parts: tuple[float, float, float, float, float] = self.executor.clock_parts()
        if any(self._earlier_counts.parts):
            first, second, third, fourth, fifth = map(
                sum, zip(parts, self._earlier_counts.parts, strict=True)
            )
            parts = first, second, third, fourth, fifth
        return parts

    @property
    def num_slots(self) -> int:
        return int(self.executor.num_slots)

    @property
    def num_expert_runs(self) -> int:
        """Distinct experts of each layer and step, summed."""
        return self._earlier_counts.expert_runs + int(self.executor.num_expert_runs)

    def save_cache(self, path: Path) -> None:
        """Write the expert cache's statistics and contents, atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            with whole_file(path) as part:
                if self._saved_cache:
                    part.write_bytes(self._saved_cache)
                else:
                    self.executor.save_cache(str(part))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"--cache-state {path}: cannot be written ({error})") from error

    def restore_cache(self, path: Path) -> int:
        """Load the output of `save_cache` and upload the experts it names, best first. Returns the number of uploads.

        Raises:
            ConfigError: the file is damaged, or made for another model, policy or version; nothing has changed.
        """
        try:
            return int(self.executor.restore_cache(str(path)))
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--cache-state {path}: {error}; delete the file or name another one to start cold"
            ) from error

    def scheduler_counts(self) -> Mapping[str, Mapping[str, int]]:
        """By group, as in `api.core_tables.COUNTERS`."""
        return self._earlier_counts.scheduler_plus(self.executor)

    def counts(self) -> PlacementCounts:
        return PlacementCounts(**_added(self._earlier_counts.placements, self.executor.counts()))

    def drain_events(self) -> dict[str, npt.NDArray[np.void]]:
        """Events since the last call as structured arrays by kind: token_layer, upload, cache_event."""
        events: dict[str, npt.NDArray[np.void]] = self.executor.drain_events()
        if self._released is not None:
            events["cache_event"] = np.concatenate([self._released, events["cache_event"]])
            self._released = None
        return events
