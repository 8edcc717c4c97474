"""A plausible run, invented: pushes through a sink what an engine would, at times of one's choosing.

An LRU cache of expert slots, experts of uneven popularity, requests that arrive in turn, a cost model of
three constants. Deterministic for a seed. Not the engine: only good for looking at what telemetry does with
events.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from twofold.api.request_record import RequestRecord
from twofold.api.training_step import TrainingStep
from twofold.api.types import EmulatedParts, RunInfo, StepParts, StepRecord
from twofold.telemetry.sink import (
    CACHE_EVENT_DTYPE,
    TOKEN_LAYER_DTYPE,
    UPLOAD_DTYPE,
    CacheEventKind,
    LoadSample,
    Placement,
    TelemetrySink,
    UploadReason,
)

HIT_US, CPU_US, UPLOAD_US = 12.0, 90.0, 55.0


def run_info(accelerator: str = "emulated:rtx4090-pcie4", **changes: object) -> RunInfo:
    values: dict[str, object] = {
        "model": "twofold-tales",
        "architecture": "Qwen3MoeForCausalLM",
        "accelerator": accelerator,
        "accelerator_reason": "asked for by --accelerator",
        "clock": "virtual" if accelerator.startswith("emulated") else "wall",
        "policy": "lru",
        "num_layers": 6,
        "num_experts": 32,
        "top_k": 4,
        "num_slots": 48,
        "expert_bytes": 393_216,
        "cpu_isa": "avx512",
        "cpu_threads": 2,
        "version": "0.1.0",
        "config_json": "{}",
    }
    return RunInfo(**{**values, **changes})  # type: ignore[arg-type]


class ManualClock:
    """Unix time that moves when told."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass
class _Running:
    number: int
    submitted_s: float
    prompt_tokens: int
    answer_tokens: int
    position: int = 0
    first_token_s: float | None = None


@dataclass
class SyntheticRun:
    """Feeds `sink`; the counters are what a query must find again."""

    sink: TelemetrySink
    clock: ManualClock
    info: RunInfo = field(default_factory=run_info)
    seed: int = 0
    step: int = 0
    num_rows: int = 0
    num_hits: int = 0
    num_cpu: int = 0
    num_fetched: int = 0
    num_uploads: int = 0
    num_evictions: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    next_number: int = 0
    running: list[_Running] = field(default_factory=list)
    virtual_us: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        info = self.info
        ranks = np.argsort(self.rng.random((info.num_layers, info.num_experts)), axis=1)
        self.popularity = np.log(1.0 / (1.0 + ranks)) * 0.9
        self.slots: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(info.num_layers)]
        self.slots_per_layer = max(info.top_k, info.num_slots // info.num_layers)
        self.num_devices = 1 + info.accelerator.count("+")
        self.sink.begin_run(info)

    def submit(self, prompt_tokens: int, answer_tokens: int) -> int:
        request = _Running(self.next_number, self.clock.now_s, prompt_tokens, answer_tokens)
        self.next_number += 1
        self.running.append(request)
        self._record(request, None)
        return request.number

    def run_steps(self, count: int, seconds_per_step: float) -> None:
        for _ in range(count):
            if self.running:
                self._step(seconds_per_step)
            self.clock.now_s += seconds_per_step

    def load_samples(self, loadtest_id: str, count: int, *, failures: int = 0) -> None:
        samples = []
        for index in range(count):
            ok = index >= failures
            ttft_ms = float(60 + 40 * self.rng.gamma(2.0))
            tpot_ms = float(8 + 2 * self.rng.gamma(2.0))
            gave_up = ok and index % 10 == 9
            samples.append(
                LoadSample(
                    loadtest_id=loadtest_id,
                    finished_s=self.clock.now_s - 60 + 60 * (index + 1) / count,
                    user=index % 10,
                    num_users=min(10, 1 + index // 2),
                    e2e_ms=ttft_ms + 99 * tpot_ms if ok else 30.0,
                    ok=ok,
                    ttft_ms=ttft_ms if ok else None,
                    tpot_ms=tpot_ms if ok and not gave_up else None,
                    completion_tokens=100 if ok else 0,
                    error=None if ok else "HTTP 503",
                    itl_p95_ms=1.5 * tpot_ms if ok else None,
                    itls_json=f"[{tpot_ms:.4f},{1.5 * tpot_ms:.4f}]" if ok else None,
                    stage="ramp" if 2 * index < count else "hold",
                    name="impatient" if index % 10 == 9 else "chat",
                    gave_up=gave_up,
                )
            )
        self.sink.load_samples(samples)

    def _record(self, request: _Running, finish_reason: str | None) -> None:
        finished = finish_reason is not None
        answered = max(0, request.position - request.prompt_tokens + 1) if request.position else 0
        self.sink.request(
            RequestRecord(
                number=request.number,
                request_id=f"chatcmpl-{request.number:04d}",
                endpoint="/v1/chat/completions",
                submitted_s=request.submitted_s,
                received_s=request.submitted_s,
                first_token_s=request.first_token_s,
                finished_s=self.clock.now_s if finished else None,
                prompt_tokens=request.prompt_tokens,
                completion_tokens=answered,
                finish_reason=finish_reason,  # type: ignore[arg-type]
                queue_s=0.001,
                prefill_s=0.02,
                decode_s=0.01 * answered,
                queue_wall_s=0.001,
                prefill_wall_s=0.02,
                decode_wall_s=0.01 * answered,
                longest_gap_s=None if answered < 2 else 0.01 * (1 + request.number % 7),
            )
        )

    def _step(self, seconds: float) -> None:
        batch: list[tuple[_Running, int]] = []
        num_prefill = num_decode = 0
        for request in self.running:
            if request.position < request.prompt_tokens:
                batch += [(request, position) for position in range(request.prompt_tokens)]
                num_prefill += request.prompt_tokens
            else:
                batch.append((request, request.position))
                num_decode += 1
        started_us = self.virtual_us
        layers = [self._layer(layer, batch) for layer in range(self.info.num_layers)]
        self.sink.native_events("token_layer", np.concatenate(layers))
        self.num_rows += sum(map(len, layers))
        self.sink.step(
            StepRecord(
                step=self.step,
                started_s=self.clock.now_s,
                num_prefill_tokens=num_prefill,
                num_decode_tokens=num_decode,
                num_running=len(self.running),
                num_waiting=max(0, len(self.running) - 8),
                step_us=self.virtual_us - started_us,
                wall_us=seconds * 0.9e6,
                parts=StepParts(experts_cpu_us=seconds * 0.5e6, attention_us=seconds * 0.3e6),
                emulated=self._emulated_parts(self.virtual_us - started_us),
                begin_us=started_us,
                kv_use=len(self.running) / 64,
                num_preemptions=int(self.step % 50 == 49),
            )
        )
        self.step += 1
        self.prefill_tokens += num_prefill
        self.decode_tokens += num_decode
        self._advance()

    def _emulated_parts(self, step_us: float) -> EmulatedParts | None:
        if self.info.clock != "virtual":
            return None
        return EmulatedParts(0.1 * step_us, 0.2 * step_us, 0.6 * step_us, 0.1 * step_us, 0.0)

    def _advance(self) -> None:
        for request in list(self.running):
            was_prompt = request.position < request.prompt_tokens
            request.position = request.prompt_tokens if was_prompt else request.position + 1
            if was_prompt:
                request.first_token_s = self.clock.now_s
                self._record(request, None)
            if request.position - request.prompt_tokens + 1 >= request.answer_tokens:
                self.running.remove(request)
                self._record(request, "stop")

    def _layer(self, layer: int, batch: list[tuple[_Running, int]]) -> np.ndarray:
        info, rng = self.info, self.rng
        noise = rng.gumbel(size=(len(batch), info.num_experts)) * 0.6
        scores = self.popularity[layer] + noise + 0.8 * np.sin(self.step / 40 + np.arange(info.num_experts))
        chosen = np.argsort(-scores, axis=1)[:, : info.top_k]
        slots = self.slots[layer]
        used = np.unique(chosen).tolist()
        placement = {expert: Placement.HIT for expert in used if expert in slots}
        misses = [expert for expert in used if expert not in slots]
        for index, expert in enumerate(misses):
            fetched = index % 3 == 0 and info.num_slots > 0
            placement[expert] = Placement.FETCHED if fetched else Placement.CPU
            if fetched:
                self._upload(layer, expert)
        for expert in used:
            if expert in slots:
                slots.move_to_end(expert)
        num_cpu = sum(place is Placement.CPU for place in placement.values())
        num_fetched = sum(place is Placement.FETCHED for place in placement.values())
        gpu_us = HIT_US * (len(used) - num_cpu) + UPLOAD_US * num_fetched
        cpu_us = CPU_US * num_cpu
        rows = np.zeros(len(batch), TOKEN_LAYER_DTYPE)
        rows["step"] = self.step
        rows["request"] = [request.number for request, _ in batch]
        rows["position"] = [position for _, position in batch]
        rows["layer"] = layer
        rows["num_routed"] = info.top_k
        rows["experts"][:, : info.top_k] = chosen
        rows["placement"][:, : info.top_k] = np.vectorize(placement.__getitem__)(chosen)
        on_device = rows["placement"][:, : info.top_k] != Placement.CPU
        rows["devices"][:, : info.top_k] = np.where(on_device, chosen % self.num_devices, 0)
        weights = np.sort(rng.dirichlet(np.ones(info.top_k) * 2, size=len(batch)), axis=1)[:, ::-1]
        rows["weights"][:, : info.top_k] = weights
        for name, place in (("num_hits", 0), ("num_cpu", 1), ("num_fetched", 2)):
            rows[name] = (rows["placement"][:, : info.top_k] == place).sum(axis=1)
        self.num_hits += int(rows["num_hits"].sum())
        self.num_cpu += int(rows["num_cpu"].sum())
        self.num_fetched += int(rows["num_fetched"].sum())
        rows["cpu_us"], rows["gpu_us"] = cpu_us, gpu_us
        rows["predicted_us"] = max(cpu_us, gpu_us) + 20.0
        rows["layer_us"] = rows["predicted_us"] * rng.uniform(0.95, 1.1)
        self.virtual_us += float(rows["layer_us"][0])
        return rows

    def _upload(self, layer: int, expert: int) -> None:
        slots = self.slots[layer]
        victim = -1
        slot = layer * self.slots_per_layer + len(slots)
        if len(slots) >= self.slots_per_layer:
            victim, slot = slots.popitem(last=False)
            self.num_evictions += 1
        slots[expert] = slot
        row = np.zeros(1, UPLOAD_DTYPE)
        row["step"], row["request"], row["layer"], row["expert"], row["slot"] = (
            self.step,
            -1,
            layer,
            expert,
            slot,
        )
        row["device"] = expert % self.num_devices
        row["size_bytes"], row["reason"] = self.info.expert_bytes, UploadReason.DEMAND
        row["queued_us"], row["begin_us"] = self.virtual_us, self.virtual_us + 2.0
        row["end_us"] = self.virtual_us + 2.0 + UPLOAD_US
        self.sink.native_events("upload", row)
        self.num_uploads += 1
        kinds = [CacheEventKind.ADMIT, CacheEventKind.PUBLISH] + [CacheEventKind.EVICT] * (victim >= 0)
        events = np.zeros(len(kinds), CACHE_EVENT_DTYPE)
        events["step"], events["request"], events["layer"], events["kind"] = self.step, -1, layer, kinds
        events["expert"] = [expert, expert, victim][: len(kinds)]
        events["device"] = events["expert"] % self.num_devices
        events["victim"], events["slot"], events["value"] = victim, slot, 0.5
        events["victim_value"], events["price"], events["at_us"] = 0.2, 0.1, self.virtual_us
        self.sink.native_events("cache_event", events)


def synthetic_history(
    sink: TelemetrySink, clock: ManualClock, *, seconds: int = 20, info: RunInfo | None = None
) -> SyntheticRun:
    """A run in which a request comes every two seconds; 10 steps a second."""
    run = SyntheticRun(sink, clock, info or run_info())
    for second in range(seconds):
        if second % 2 == 0:
            run.submit(prompt_tokens=8 + second % 5, answer_tokens=25 + 3 * (second % 4))
        run.run_steps(10, 0.1)
    while run.running:
        run.run_steps(1, 0.1)
    return run


def hour_of_a_large_model(
    sink: TelemetrySink, clock: ManualClock, *, seconds: int = 3600, tokens_per_s: int = 4
) -> RunInfo:
    """48 layers × 128 experts for an hour, where only sums matter: routing is drawn evenly, one step a second."""
    info = run_info(num_layers=48, num_experts=128, top_k=8, num_slots=1536)
    sink.begin_run(info)
    rng = np.random.default_rng(0)
    for second in range(seconds):
        rows = np.zeros(info.num_layers * tokens_per_s, TOKEN_LAYER_DTYPE)
        rows["layer"] = np.repeat(np.arange(info.num_layers), tokens_per_s)
        rows["step"] = rows["position"] = second
        rows["num_routed"], rows["num_hits"], rows["num_cpu"] = info.top_k, 5, 3
        rows["experts"] = rng.integers(0, info.num_experts, rows["experts"].shape)
        rows["placement"] = rng.integers(0, 3, rows["placement"].shape)
        sink.native_events("token_layer", rows)
        sink.step(StepRecord(second, clock.now_s, 0, tokens_per_s, 1, 0, 5_000.0, 6_000.0))
        clock.now_s += 1
    return info


LOAD: Final = np.arange(12, dtype=np.uint32).reshape(2, 6)
"""Tokens of each expert in each step of `training_history`."""


def training_info() -> RunInfo:
    """The run of `training_history`."""
    return run_info("none", kind="training", num_layers=2, num_experts=6, top_k=2, num_slots=0)


def training_history(sink: TelemetrySink, *, steps: int = 30) -> None:
    """A fine-tuning run that is cut off after `steps` of 40, evaluated after every tenth."""
    sink.begin_run(training_info())
    for number in range(1, steps + 1):
        record = TrainingStep(
            step=number,
            num_steps=40,
            at_s=1_000_000.0 + 2 * number,
            loss=2.0 + 3.0 / number,
            learning_rate=2e-4 * number / 40,
            grad_norm=1.0 / number,
            num_tokens=512,
            tokens_per_s=256.0 + number % 3,
            remaining_s=2.0 * (40 - number),
            memory_bytes=3 * 10**9,
            expert_load=LOAD,
        )
        sink.training_step(record)
        if number % 10 == 0:
            sink.training_step(replace(record, eval_loss=2.5 + 2.0 / number))
