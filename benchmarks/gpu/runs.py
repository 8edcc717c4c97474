"""Runners of one model that differ in slots, rules and ways to run a step, and decode steps of them under one routing.

Files, dense weights and the experts' store are loaded once and shared; each runner has slots, KV cache and books of its
own. The other engines' rules are `twofold.tools.lab.systems`'; here they move real bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.blocks import ops
from twofold.device.finding import on_devices
from twofold.device.model import DeviceModel
from twofold.device.runner import DeviceRunner
from twofold.engine.kv_cache import PagePool
from twofold.engine.scheduler import Scheduler
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import MoeRuntime
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import DenseCost, MoeShape, SlotPlan
from twofold.models.sizing import dense_stretches
from twofold.step.expert_loading import moe_shape
from twofold.step.sampler import Sampler
from twofold.step.sequences import Sequence as Request
from twofold.tools.lab.systems import SYSTEMS as PEERS

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import ForcedRouting, ForcedTrace, Shape, model_files, shrunk, trace_for

F32 = npt.NDArray[np.float32]
Mode = Literal["graph", "eager", "placed"]
"""A table step as one graph, the same kernel by kernel, or a step that the host places layer by layer."""
PAGE_SIZE: Final = 16
MAX_CONTEXT: Final = 1024
MOST_BATCH: Final = 8


@dataclass(frozen=True)
class System:
    """A placement system. `rules` are those of `Device.accelerator`."""

    name: str
    policy: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    has_slots: bool = True
    frozen: bool = False
    """Nothing is ever uploaded."""

    def rules_in(self, mode: Mode) -> Mapping[str, Any]:
        """Rules for `mode`. Table steps fetch nothing into slots: fetched experts are uploaded afterwards instead."""
        return self.rules if mode == "placed" or self.frozen else {**self.rules, "background_uploads": True}


_FIXED_FRACTION: Final = {
    name: value for name, value in PEERS["freetoken"].options.items() if name != "policy"
}
TWOFOLD: Final = System("payback", "payback")
LRU: Final = System("LRU, misses on the CPU", "lru", {"fetch_rule": "none"})
ALL_CPU: Final = System("all on the CPU", "lru", {"fetch_rule": "none"}, has_slots=False)
FETCH_ALL: Final = System(
    "every miss fetched",
    "lru",
    {"fetch_rule": "all", "background_uploads": False, "always_cache_fetched": True},
)
FIXED_FRACTION: Final = System("fixed fraction fetched, one LRU pool", "lru", _FIXED_FRACTION)
FROZEN: Final = System("frozen", "payback", {"fetch_rule": "none", "background_uploads": False}, frozen=True)


@dataclass
class LoadedModel:
    """State that all runners of a model share."""

    shape: Shape
    files: Any
    pool: Any
    store: Any
    dense: DeviceModel
    routing: ForcedRouting
    trace: ForcedTrace
    pinned: Any = None
    """A runtime without slots: while it is there the store stays pinned, which takes seconds."""

    @property
    def moe_shape(self) -> MoeShape:
        return moe_shape(self.files)

    @property
    def num_experts(self) -> int:
        return self.moe_shape.num_layers * self.moe_shape.num_experts


def loaded(machine: Machine, shape: Shape) -> LoadedModel:
    """The model of a shape; loaded once. The previous one is freed: two do not fit into every machine's memory."""
    shape = shrunk(shape, machine.sizes.shrink)
    for key in [
        key for key in machine.kept if isinstance(key, tuple) and key[0] == "loaded" and key[1] != shape
    ]:
        machine.forget(key)
    return machine.keep(("loaded", shape), lambda: _load(machine, shape))


def _load(machine: Machine, shape: Shape) -> LoadedModel:
    files = model_files(machine, shape)
    pool = ops.ThreadPool(machine.sizes.cpu_threads)
    beneath = machine.hardware.kernels(MAX_CONTEXT)
    layers, top_k = len(files.config.moe_layers), files.config.routed.top_k
    routing = ForcedRouting(beneath, layers, top_k, machine.device)
    dense = DeviceModel(files, pool, machine.device, routing, MAX_CONTEXT)  # type: ignore[arg-type]
    shared = LoadedModel(shape, files, pool, None, dense, routing, trace_for(machine, shape))
    shared.store = experts_on_cpu(shared, files.expert_layers()).store
    shared.pinned = MoeRuntime(
        shared.moe_shape, shared.store, pool, on_devices([machine.hardware], "pins the store"),
        SlotPlan(0, "lru", num_staging=top_k), DenseCost([], []),
    )  # fmt: skip
    return shared


def experts_on_cpu(model: LoadedModel, experts: Any) -> MoeRuntime:
    """A runtime of the engine without a GPU. experts: the store, or layers to pack into one."""
    choice = AcceleratorChoice("none", "measured")
    return MoeRuntime(model.moe_shape, experts, model.pool, choice, SlotPlan(0, "lru"), DenseCost([], []))


def make_runner(
    machine: Machine,
    model: LoadedModel,
    system: System,
    share: float,
    mode: Mode,
    profile: MachineProfile | None = None,
    watchdog_s: float = 5.0,
) -> DeviceRunner:
    """A runner with slots for `share` of all experts."""
    slots = round(share * model.num_experts) if system.has_slots else 0
    plan = SlotPlan(
        slots,
        system.policy,
        prefetch=False,
        num_staging=4 * model.moe_shape.top_k,
        options=system.rules_in(mode),
    )
    choice = on_devices([machine.hardware], "measured")
    cost = DenseCost(*dense_stretches(model.files))
    moe = MoeRuntime(model.moe_shape, model.store, model.pool, choice, plan, cost, None, profile)
    runner = DeviceRunner(
        model.dense, moe, [machine.hardware], num_pages=MOST_BATCH * MAX_CONTEXT // PAGE_SIZE, page_size=PAGE_SIZE,
        max_context=MAX_CONTEXT, graphs=mode == "graph", watchdog_s=watchdog_s,
    )  # fmt: skip
    if mode == "placed":
        runner.why_placed = "measured so"
    return runner


class Conversation:
    """Requests in a runner, one step at a time, all decoding after the first step. Times are of `forward` alone."""

    def __init__(
        self,
        machine: Machine,
        model: LoadedModel,
        runner: Any,
        batch: int = 1,
        samplers: Sequence[Sampler] | None = None,
        forced: bool = True,
        prompt_tokens: int = 4,
    ) -> None:
        """samplers: one for each request (default: greedy). forced: the trace routes, not the model."""
        self._machine, self._model, self._runner, self._forced = machine, model, runner, forced
        self._scheduler = Scheduler(PagePool(MOST_BATCH * MAX_CONTEXT // PAGE_SIZE, PAGE_SIZE), batch, 512)
        random = np.random.default_rng(5)
        vocab = model.files.config.vocab_size
        prompts = [random.integers(0, vocab, prompt_tokens).tolist() for _ in range(batch)]
        greedy = SamplingParams(temperature=0.0)
        self._samplers = samplers or [Sampler(greedy, prompt) for prompt in prompts]
        for number, prompt in enumerate(prompts):
            request = GenerationRequest(tuple(prompt), SamplingParams(), lambda chunk: None, f"r{number}")
            self._scheduler.add(Request(number, request, prompt, MAX_CONTEXT - 8))
        self.step = 0

    def steps(self, count: int) -> list[float]:
        """Seconds of each of the next steps."""
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        schedule = self._scheduler.schedule()
        scheduled = schedule.items
        rows = sum(item.num_tokens for item in scheduled)
        if self._forced:
            self._model.routing.set_routing(*self._model.trace.rows(self.step, rows))
        self._machine.sync()
        samplers = [self._samplers[item.sequence.number] for item in scheduled if item.samples]
        began = time.perf_counter()
        picked = iter(self._runner.forward(self.step, schedule, samplers))
        took = time.perf_counter() - began
        self.step += 1
        for item in scheduled:
            item.sequence.num_computed += item.num_tokens
            if item.samples:
                item.sequence.token_ids.append(next(picked))
        return took


def check_mode(runner: DeviceRunner, mode: Mode) -> None:
    """AssertionError where steps did not run as they were asked to."""
    if mode == "placed":
        return
    if runner.why_placed is not None:
        raise AssertionError(f"steps fell back to the host's placement: {runner.why_placed}")
    if mode == "graph" and runner.why_eager is not None:
        raise AssertionError(f"steps are no graphs: {runner.why_eager}")
