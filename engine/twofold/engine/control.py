"""Changes and inspects a serving engine: memory split, sleep, prefix cache, memory use.

Memory changes only between two steps, on the engine's thread, completely or not at all. No request is lost and no token
changes: pages move with their sequences, and a sequence that loses its pages computes them again later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import numpy as np

from twofold.api.config import EngineConfig
from twofold.api.control import ExpertPlacement, LayerPlacement, MemorySplit, MemoryUse, Resize
from twofold.api.errors import ConfigError
from twofold.api.placement_config import SLOT_FIELDS
from twofold.api.types import RequestProgress
from twofold.engine.inbox import Inbox
from twofold.engine.kv_cache import PagePool
from twofold.engine.scheduler import Scheduler
from twofold.step.runner import LoadedRunner

T = TypeVar("T")
P = ParamSpec("P")
Change = Literal["resize", "sleep", "wake"]

_STATES: Final = ("absent", "in flight", "resident")
_MAX_SHOWN: Final = 4096
"""Maximum number of experts listed by `placement`."""


def _between_steps(
    method: Callable[Concatenate[LiveControl, P], T],
) -> Callable[Concatenate[LiveControl, P], T]:
    """The method run on the engine's thread before its next step; see `LiveControl.between_steps`."""

    @functools.wraps(method)
    def run(self: LiveControl, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.between_steps(lambda: method(self, *args, **kwargs))

    return run


class LiveControl:
    """Live control of one engine. Public methods may be called from any thread but the engine's. Those that change
    something return when it is done, before the next step."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedRunner,
        pool: PagePool,
        scheduler: Scheduler,
        inbox: Inbox,
        is_served: Callable[[], bool],
        settle: Callable[[], None],
        on_change: Callable[[Change], None],
    ) -> None:
        """
        Args:
            is_served: whether the engine's own thread runs tasks; otherwise the caller runs them.
            settle: finishes uploads and passes on their recorded events.
            on_change: called on the engine's thread with each change.
        """
        moe = loaded.runner.moe
        self.split = MemorySplit(moe.num_slots, moe.plan.num_staging, loaded.num_pages, loaded.max_context)
        """The split in effect while the engine is awake."""
        self.asleep = False
        self._config, self._loaded, self._runner = config, loaded, loaded.runner
        self._pool, self._scheduler, self._inbox = pool, scheduler, inbox
        self._is_served, self._settle, self._on_change = is_served, settle, on_change

    # ---- callers' threads -------------------------------------------------------------------------------------------

    @_between_steps
    def resize(self, requested: Resize) -> MemorySplit:
        """Change the memory split. Running requests continue after a pause; those whose pages were needed wait.

        Raises:
            ConfigError: the split does not fit; the message names one that does. Nothing has changed.
            CapacityError, KernelError: allocation failed after all; nothing has changed.
        """
        if self.asleep:
            raise ConfigError("the engine is asleep and holds no memory to split; wake it first")
        split = self._plan(requested)
        self._check_live(split)
        self._apply(split)
        self._on_change("resize")
        return split

    @_between_steps
    def sleep(self) -> None:
        """Free expert slots and KV cache; weights stay in host memory. Running requests wait until `wake` and then
        continue unchanged; new requests are refused. Safe to call twice."""
        if self.asleep:
            return
        self._scheduler.preempt_until(lambda: False)
        self._pool.drop_cached(save=True)
        self._free_pages()
        self._settle()
        self._runner.release_slots()
        self.asleep = True
        self._on_change("sleep")

    @_between_steps
    def wake(self) -> None:
        """Allocate as much memory as before `sleep`. Safe to call twice.

        Raises:
            ConfigError, CapacityError, KernelError: the memory is not available; the engine stays asleep.
        """
        if not self.asleep:
            return
        split = self.split
        self._plan(Resize(max_total_tokens=split.num_pages * self._config.page_size))
        if self._runner.moe.choice.kind != "none":
            self._runner.allocate_slots(split.num_slots, split.num_staging)
        try:
            self._runner.resize_pages(split.num_pages, {}, keep_records=False)
        except BaseException:
            self._runner.release_slots()
            raise
        self._pool.resize(split.num_pages, {}, ())
        self.asleep = False
        self._on_change("wake")

    @_between_steps
    def drop_prefixes(self) -> int:
        """Evict all prefix-cache pages in memory that no running sequence uses. Returns the number of pages."""
        return self._pool.drop_cached()

    @_between_steps
    def prefix_labels(self) -> list[bytes]:
        """See `PagePool.prefix_labels`."""
        return self._pool.prefix_labels()

    @_between_steps
    def placement(self, layers: Iterable[int] | None = None, top: int = 16) -> list[LayerPlacement]:
        """The `top` experts by worth of each given MoE layer (None: all layers), at most 4096 in all. Empty without
        slots.

        Raises:
            ConfigError: there is no such layer.
        """
        found = self._runner.moe.executor.placement()
        if found is None:
            return []
        states, worth = found
        num_layers = len(states)
        wanted = list(range(num_layers) if layers is None else layers)
        for layer in wanted:
            if not 0 <= layer < num_layers:
                raise ConfigError(
                    f"layer {layer} was given; the model's MoE layers are 0 to {num_layers - 1}"
                )
        top = max(1, min(top, _MAX_SHOWN // max(1, len(wanted))))
        return [
            LayerPlacement(
                layer,
                int((states[layer] == len(_STATES) - 1).sum()),
                tuple(
                    (int(expert), _STATES[states[layer, expert]], float(worth[layer, expert]))
                    for expert in sorted(
                        range(states.shape[1]), key=lambda e: (-worth[layer, e], -int(states[layer, e]), e)
                    )[:top]
                ),
            )
            for layer in wanted
        ]

    @_between_steps
    def expert_placement(self) -> ExpertPlacement:
        """All experts that are in slots; no layers if there are no slots."""
        moe = self._runner.moe
        found = moe.executor.placement()
        states = np.zeros((0, 0)) if found is None else found[0]
        resident = tuple(tuple(np.flatnonzero(layer == len(_STATES) - 1).tolist()) for layer in states)
        devices = moe.choice.device_names
        held_by = moe.executor.placement_devices() if devices else None
        return ExpertPlacement(
            resident,
            moe.shape.num_experts,
            num_slots=moe.num_slots,
            strategy=moe.plan.placement.strategy,
            policy=moe.policy,
            is_static=moe.plan.placement.is_static,
            dynamic_update=moe.dynamic_update.counts,
            devices=devices,
            held_by=()
            if held_by is None
            else tuple(
                tuple(held_by[layer, list(experts)].tolist()) for layer, experts in enumerate(resident)
            ),
        )

    @_between_steps
    def place_experts(self, resident: Seq[Seq[int]]) -> int:
        """Place exactly these experts of each MoE layer in slots; a policy that moves experts continues from there.
        Running requests pause meanwhile. Returns the number of uploads.

        Raises:
            ConfigError: wrong layer or expert numbers for this model, or too few slots; nothing has changed.
            KernelError: the device failed.
        """
        moe, shape = self._runner.moe, self._runner.moe.shape
        if self.asleep:
            raise ConfigError("the engine is asleep and has no slots to place experts in; wake it first")
        if moe.num_slots == 0:
            raise ConfigError(
                f"there are no expert slots (accelerator {moe.choice.label}); give some with a resize"
            )
        mask = np.zeros((shape.num_layers, shape.num_experts), np.bool_)
        largest = max((expert for layer in resident for expert in layer), default=-1)
        if len(resident) != shape.num_layers or largest >= shape.num_experts:
            raise ConfigError(
                f"a placement of {len(resident)} layers with experts up to {largest} was given; the model has "
                f"{shape.num_layers} layers of {shape.num_experts} experts"
            )
        for layer, experts in enumerate(resident):
            mask[layer, list(experts)] = True
        self._settle()
        return self._runner.place_experts(mask)

    def memory(self) -> MemoryUse:
        """Memory use at this moment."""
        pool, loaded = self._pool, self._loaded
        return MemoryUse(
            num_slots=self._runner.moe.num_slots,
            slots_bytes=self._runner.moe.executor.device_bytes,
            num_pages=pool.num_pages,
            page_bytes=loaded.page_bytes,
            page_size=pool.page_size,
            num_free_pages=pool.num_free,
            num_cached_pages=pool.num_cached,
            num_snapshots=pool.num_snapshots,
            record_bytes=loaded.record_bytes,
            max_context=self.split.max_context,
        )

    def requests(self) -> list[RequestProgress]:
        """Running requests, then waiting ones; a request that changes state meanwhile is listed once."""
        places = ((False, self._scheduler.waiting), (True, self._scheduler.running))
        found = {
            sequence.number: RequestProgress(
                sequence.request,
                sequence.number,
                max_tokens=sequence.max_tokens,
                is_running=is_running,
                num_computed=sequence.num_computed,
                num_generated=sequence.num_generated,
                num_cached=sequence.num_cached,
                submitted_s=sequence.submitted_s,
            )
            for is_running, sequences in places
            for sequence in tuple(sequences)
        }
        return sorted(found.values(), key=lambda progress: (not progress.is_running, progress.number))

    def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine's thread before its next step; return its result or raise its exception.

        Raises:
            CapacityError: the engine is closed.
        """
        return self._inbox.run_between_steps(work) if self._is_served() else self._inbox.run_unserved(work)

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def _plan(self, requested: Resize) -> MemorySplit:
        """The split for `requested`, if it fits."""
        moe, split, plan = self._runner.moe, self.split, self._loaded.plan
        given = {name: value for name, value in vars(requested).items() if value is not None}
        if not given:
            raise ConfigError(
                "no new size was given; give --gpu-experts-ratio, --num-gpu-experts or --max-total-tokens"
            )
        if plan is None:
            raise ConfigError(
                f"accelerator {moe.choice.label} cannot be resized at run time; restart with other sizes"
            )
        slots_requested = given.keys() & {"gpu_experts_ratio", "num_gpu_experts"}
        if slots_requested and moe.choice.kind == "none":
            raise ConfigError(
                f"--{min(slots_requested).replace('_', '-')} was given; accelerator none has no expert slots: only "
                "--max-total-tokens can change"
            )
        experts = moe.shape.num_layers * moe.shape.num_experts
        sizes: dict[str, Any] = {
            **dict.fromkeys(SLOT_FIELDS),
            "gpu_experts_ratio": None if slots_requested else split.num_slots / experts,
            "max_total_tokens": split.num_pages * self._config.page_size,
        }
        num_used = self._pool.num_pages - self._pool.num_free
        found = plan(dataclasses.replace(self._config, **sizes | given), num_used)
        if found.num_slots == split.num_slots and 0 <= split.num_staging <= found.num_staging:
            found = dataclasses.replace(found, num_staging=split.num_staging)  # no reason to move any expert
        return found

    def _check_live(self, split: MemorySplit) -> None:
        """Raise ConfigError if an accepted request would not fit, even alone."""
        page_size = self._config.page_size
        live: Seq[RequestProgress] = self.requests()
        if not live:
            return
        most = max(live, key=lambda each: len(each.request.prompt_token_ids) + each.max_tokens)
        needed = len(most.request.prompt_token_ids) + most.max_tokens
        if needed > split.num_pages * page_size:
            raise ConfigError(
                f"the split leaves {split.num_pages * page_size} tokens for the KV cache; request "
                f"{most.request.request_id} may need {needed}: give --max-total-tokens of at least "
                f"{-(-needed // page_size) * page_size}, cancel the request, or wait for it"
            )

    def _apply(self, split: MemorySplit) -> None:
        """Shrink one part before growing the other; undo the shrink if the growth fails."""
        old = self.split
        parts = [self._set_slots, self._set_pages]
        if split.num_slots > old.num_slots:
            parts.reverse()
        first, second = parts
        first(split)
        try:
            second(split)
        except BaseException:
            first(old)
            raise
        self.split = split

    def _set_slots(self, split: MemorySplit) -> None:
        moe = self._runner.moe
        before = (moe.num_slots, moe.plan.num_staging)
        if before == (split.num_slots, split.num_staging):
            return
        self._settle()
        self._runner.release_slots()
        try:
            self._runner.allocate_slots(split.num_slots, split.num_staging)
        except BaseException:
            self._runner.allocate_slots(*before)
            raise

    def _set_pages(self, split: MemorySplit) -> None:
        num_pages, pool, scheduler = split.num_pages, self._pool, self._scheduler
        if num_pages == pool.num_pages:
            return
        scheduler.preempt_until(lambda: pool.num_used_by(scheduler.running) <= num_pages)
        pool.trim(num_pages)
        places = pool.page_moves(num_pages)
        self._runner.resize_pages(num_pages, places)
        pool.resize(num_pages, places, scheduler.running)
        scheduler.invalidate_schedule()

    def _free_pages(self) -> None:
        self._runner.resize_pages(1, {}, keep_records=False)
        self._pool.resize(1, {}, ())
        self._scheduler.invalidate_schedule()
