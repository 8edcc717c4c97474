"""Running a `DeviceRunner` on the fake device in tests: made from a model's files, driven by the real scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twofold.api.adapter_config import AdapterConfig
from twofold.api.config import EngineConfig
from twofold.api.media import PromptMedia
from twofold.api.types import GenerationRequest, LoadedAdapter, SamplingParams
from twofold.blocks import ops
from twofold.device.adapters.loaded import DeviceAdapters
from twofold.device.finding import on_devices
from twofold.device.model import DeviceModel, Stage
from twofold.device.runner import DeviceRunner
from twofold.device.table_layers import TableLayers
from twofold.engine.kv_cache import PagePool
from twofold.engine.scheduler import Scheduler
from twofold.experts.accelerator import AcceleratorChoice
from twofold.models import open_model_files
from twofold.step.expert_loading import load_experts, slot_plan
from twofold.step.model import LoadedModel
from twofold.step.runner import ModelRunner, Runner
from twofold.step.sampler import Sampler
from twofold.step.sequences import Sequence as Request

from tests.device.fake_device import FakeDevice
from tests.engine.scripted_sampler import ScriptedSampler

PAGE_SIZE = 8
NUM_PAGES = 128
NUM_RECORDS = 33
MAX_CONTEXT = 96
ADAPTER_BYTES = 1 << 26
F32 = npt.NDArray[np.float32]


def make_runner(
    fake: ModuleType,
    path: Path,
    *,
    slots: int,
    policy: str = "payback",
    prefetch: str = "off",
    device: dict[str, Any] | None = None,
    others: Sequence[dict[str, Any]] = (),
    tensor_split: tuple[float, ...] = (),
    homes: tuple[int, ...] = (),
    table_steps: bool = True,
    rules: dict[str, Any] | None = None,
    machine: str | None = None,
    expert_devices: tuple[str, ...] = (),
    num_deferred: int = 0,
    cache_prior: float = 0.0,
    loras: AdapterConfig | None = None,
    **options: Any,
) -> DeviceRunner:
    """A runner on a fake device of its own, opened with `device`, and one beside it for each of `others`.

    table_steps=False: the host places every step. tensor_split: shares of the slots, even by default. homes: the device
    of each layer, all of which have experts. loras: of the adapters that it computes; None: none.
    """
    files = open_model_files(path)
    pool = ops.ThreadPool(1)
    config = EngineConfig(model=str(path), policy=policy, prefetch=prefetch, machine_profile=machine)
    on = FakeDevice(fake.open_device(**{"tick_us": 2.0, **(device or {})}))
    beside = [FakeDevice(fake.open_device(beside=on.native, **each)) for each in others]
    devices = [on, *beside]
    shares = tensor_split or ((1 / len(devices),) * len(devices) if others else ())
    plan = replace(
        slot_plan(config, files, slots, devices=expert_devices, split=shares),
        options={"cache_prior": cache_prior, **(rules or {})},
        num_deferred=num_deferred,
        homes=homes,
    )
    moe = load_experts(files, pool, on_devices(devices, "a test"), config, plan)
    fake.spare(on.native, moe.accelerator.slot_table)
    model = DeviceModel(
        files,
        pool,
        on.torch_device,
        on.kernels(MAX_CONTEXT),
        MAX_CONTEXT,
        others=[Stage(each.torch_device, each.kernels(MAX_CONTEXT), each.active) for each in beside],
        homes=homes,
    )
    adapters = None
    if loras is not None:
        adapters = DeviceAdapters(
            files, model.matrices, moe.store, devices=devices, config=loras, num_bytes=ADAPTER_BYTES
        )
    runner = DeviceRunner(
        model,
        moe,
        devices,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_context=MAX_CONTEXT,
        num_records=NUM_RECORDS,
        look_ahead=prefetch == "on",
        homes=homes,
        adapters=adapters,
        **options,
    )
    if not table_steps:
        runner.why_placed = "a test"
    return runner


def make_cpu_runner(path: Path, num_deferred: int = 0) -> ModelRunner:
    """The engine without a device, float32 keys and values; with weights of f32 it rounds nothing to bf16."""
    files = open_model_files(path)
    pool = ops.ThreadPool(1)
    config = EngineConfig(model=str(path))
    plan = replace(slot_plan(config, files, 0), num_deferred=num_deferred)
    moe = load_experts(files, pool, AcceleratorChoice("none", "a test"), config, plan)
    planes, records = files.config.cache_planes("float32"), files.config.record_bytes
    cache = ops.StateCache(planes, NUM_PAGES, PAGE_SIZE, records, NUM_RECORDS)
    return ModelRunner(LoadedModel(files, pool), moe, cache)


@contextmanager
def found_device(
    open_native: Callable[[], Any],
    make: Callable[[Any], FakeDevice] = FakeDevice,
    *,
    self_check: bool = False,
) -> Iterator[None]:
    """Context in which this machine has a device: each lookup finds a new fake. The self-check takes a second on it, so
    only tests that ask for it run it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not self_check:
            patch.setattr("twofold.device.checks.self_check.find_fault", lambda *_: "")
        patch.setattr("twofold.device.finding.find_device", lambda index=0: (make(open_native()), ""))
        yield


@dataclass
class Play:
    """Requests on their way through a runner."""

    runner: Runner
    max_batched_tokens: int = 48
    on_step: Callable[[int], None] = lambda step: None
    bidirectional: bool = False
    """Whether tokens of a picture attend to one another."""
    step: int = 0
    _pool: PagePool = field(default_factory=lambda: PagePool(NUM_PAGES, PAGE_SIZE, NUM_RECORDS))

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        samplers: Sequence[Sampler],
        num_tokens: int,
        adapters: Sequence[int] = (),
        media: Sequence[PromptMedia | None] = (),
    ) -> list[list[int]]:
        """`num_tokens` tokens for each prompt, all at once. adapters: the number of each one's, -1: none. media: each
        one's pictures."""
        scheduler = Scheduler(self._pool, len(prompts), self.max_batched_tokens)
        requests = []
        for number, prompt in enumerate(prompts):
            adapter = adapters[number] if adapters else -1
            request = GenerationRequest(
                tuple(prompt),
                SamplingParams(),
                lambda chunk: None,
                f"r{number}",
                adapter=LoadedAdapter(str(adapter), adapter, "00") if adapter >= 0 else None,
                media=media[number] if media else None,
            )
            runs = request.media.runs if request.media is not None and self.bidirectional else ()
            requests.append(Request(number, request, list(prompt), num_tokens, bidirectional=runs))
            scheduler.add(requests[-1])
        left = dict(enumerate(samplers))
        while scheduler.has_work:
            schedule = scheduler.schedule()
            scheduled = schedule.items
            self.on_step(self.step)
            of_step = [left[item.sequence.number] for item in scheduled if item.samples]
            picked = iter(self.runner.forward(self.step, schedule, of_step))
            self.step += 1
            for item in scheduled:
                item.sequence.num_computed += item.num_tokens
                if not item.samples:
                    continue
                item.sequence.token_ids.append(next(picked))
                if item.sequence.num_generated == num_tokens:
                    scheduler.finish(item.sequence)
        return [request.token_ids[len(request.request.prompt_token_ids) :] for request in requests]


def scripted(
    runner: Runner,
    num_requests: int,
    num_tokens: int,
    vocab_size: int,
    on_step: Callable[[int], None] | None = None,
    adapters: Sequence[int] = (),
) -> F32:
    """Logits [requests * tokens, vocabulary] of a fixed conversation, whatever the runner would have picked."""
    random = np.random.default_rng(11)
    prompts = [random.integers(0, vocab_size, 5 + 3 * n).tolist() for n in range(num_requests)]
    samplers = [ScriptedSampler(random.integers(0, vocab_size, num_tokens).tolist()) for _ in prompts]
    play = Play(runner)
    if on_step is not None:
        play.on_step = on_step
    play.answer(prompts, samplers, num_tokens, adapters)
    return np.stack([row for sampler in samplers for row in sampler.seen])


@dataclass(frozen=True)
class Lost:
    """Ways to lose the table step `at`, and every later one that is tried: stand-ins for `TableLayers.forward`."""

    HOST_LIMIT_S = 0.2
    runner: DeviceRunner
    at: int
    forward: Callable[..., None] = TableLayers.forward

    @property
    def is_now(self) -> bool:
        return self.runner.num_table_steps == self.at

    def silent(self, *given: Any) -> None:
        """A kernel that takes ten times as long as the host waits. No other step is held to that."""
        if self.is_now:
            time.sleep(10 * self.HOST_LIMIT_S)
        self.forward(*given)

    def limit_host(self, step: int) -> None:
        """Before a step: what the host waits in the lost one."""
        if self.is_now:
            self.runner._watchdog_s = self.HOST_LIMIT_S

    def raising(self, *given: Any) -> None:
        """A launch that fails in the middle of a step."""
        if self.is_now and given[1] == 1:
            raise RuntimeError("no such kernel")
        self.forward(*given)

    def aborted(self, *given: Any) -> None:
        """Aborts the step."""
        if self.is_now and given[1] == 1:
            given[0].mailbox.abort()
        self.forward(*given)

    def lose(self, patch: pytest.MonkeyPatch, way: str) -> None:
        # A plain function, so that it is bound to the layers.
        patch.setattr(TableLayers, "forward", lambda *given: getattr(self, way)(*given))


@contextmanager
def two_devices(fake: ModuleType, *rooms: int) -> Iterator[None]:
    """This machine has devices with so much memory, on one clock."""
    opened: list[Any] = []

    def find(index: int = 0) -> tuple[FakeDevice | None, str]:
        if index >= len(rooms):
            return None, "there is no such device, only " + ", ".join(f"cuda:{n}" for n in range(len(rooms)))
        clock = {"beside": opened[0]} if opened else {"tick_us": 2.0}
        opened.append(fake.open_device(index, total_bytes=rooms[index], **clock))
        return FakeDevice(opened[-1]), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twofold.device.finding.find_device", find)
        yield
