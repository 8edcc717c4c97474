"""Calibration: measures this machine's CPU for the cost model and fits the curve.

A layer that gives n tokens to each of k experts is timed over a grid of (k, n) on experts of the model's own shape and
number, filled with random weights, so that caches are as warm or cold as in use. Fit: layer(k, n) = a + k c(n); `a` is
hand-out and join, c the curve of one expert. The fit is evaluated on mixed loads that were not fitted.

`device.calibration` measures an accelerator; on a machine without one its figures come from a base profile and are
marked as such.
"""

from __future__ import annotations

import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.blocks import ops
from twofold.experts.cpu_cost import cpu_cost_model
from twofold.experts.packing import make_store
from twofold.experts.profiles import CpuCurve, Figure, MachineProfile
from twofold.experts.slot_plan import MoeShape
from twofold.weights.weight_format import (
    SCALE_GRID,
    WeightMatrix,
    element_type,
    packed_expert_bytes,
    source_row_bytes,
)

TOKENS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_STORE_BYTES: Final = 1 << 30
MIN_REPEATS: Final = 5
_MAX_ROWS: Final = 1024
"""Most rows of a layer in the grid: twice the usual prefill chunk."""
_LAYERS_LIMIT_S: Final = 30.0
_COPY_BYTES: Final = 64 << 20

Loads = tuple[int, ...]
"""Tokens of each active expert of a layer."""
ProgressFn = Callable[[str, float], None]
"""(what is measured, share done)."""


class Predicted:
    """A measurement and the fit's prediction of it."""

    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted_us / self.measured_us - 1)


@dataclass(frozen=True)
class Sample(Predicted):
    """One kind of layer, timed."""

    loads: Loads
    measured_us: float
    """Median over the repeats."""
    predicted_us: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Measurements, and how well the fit predicts them."""

    curve: CpuCurve
    expert_bytes: int
    """Bytes of one packed expert."""
    grid: tuple[Sample, ...]
    """Samples to which the curve was fitted."""
    unseen: tuple[Sample, ...]
    """Layers with mixed loads, excluded from the fit."""
    thread_us: dict[int, float] = field(default_factory=dict)
    """Threads → time of one decode layer (top-k experts, one token each)."""
    contention: float = 0.0
    """Slow-down of decode while another thread copies memory; 0.22: 22 % slower."""
    copy_gbps: float = 0.0
    """Copy rate of that other thread meanwhile."""

    @property
    def median_error(self) -> float:
        return float(np.median([sample.error for sample in self.unseen]))


class LayerTimer:
    """Times MoE layers of random weights on the CPU. Every call uses other experts, as decode does.

    `clock` (seconds) replaces the layer's own wall time, for instance by CPU time on a busy machine.
    """

    def __init__(
        self,
        shape: MoeShape,
        pool: ops.ThreadPool,
        seed: int = 0,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        layers = max(1, min(shape.num_layers, MAX_STORE_BYTES // (_expert_bytes(shape) * shape.num_experts)))
        self.shape = replace(shape, num_layers=layers, formats=(shape.usual,) * layers, limits=())
        self._store = random_store(self.shape, pool, seed)
        self._random = np.random.default_rng(seed)
        self._rows = np.empty((0, shape.hidden), np.float32)
        self._step = 0
        self.use(pool)

    def use(self, pool: ops.ThreadPool) -> None:
        """Use another pool from now on."""
        self._executor = _core.MoeExecutor(pool, self._store)
        self._executor.events_enabled = True
        size = self.shape.hidden
        square = WeightMatrix(np.ones((size, size), np.float32), "f32", size)
        self._dense = ops.LmHead(pool, np.ones(size, np.float32), ops.PackedMatrix(pool, [square]), 1e-6)

    def time(self, loads: Loads, repeats: int) -> float:
        """Median microseconds of a layer whose active experts have these loads."""
        ((sample,),) = self.blocks([[loads]], repeats)
        return sample.measured_us

    def blocks(
        self,
        blocks: Sequence[Sequence[Loads]],
        repeats: int,
        progress: Callable[[float], None] | None = None,
        limit_s: float = math.inf,
    ) -> list[list[Sample]]:
        """Each kind of layer with its median time. The kinds alternate, so that a drifting clock speed affects all
        alike.

        Give blocks of layers of about equal size. Each layer runs once before it is timed, because the previous run
        decides what the caches hold, and in use decode follows decode and a chunk follows a chunk. (Small layers timed
        right after large ones came out a third too slow.) Beyond limit_s there are no more repeats than MIN_REPEATS.
        """
        times = [np.empty((repeats, len(block))) for block in blocks]
        began = time.monotonic()
        for repeat in range(repeats):
            if repeat >= MIN_REPEATS and time.monotonic() - began > limit_s:
                times = [taken[:repeat] for taken in times]
                break
            for block, taken in zip(blocks, times, strict=True):
                for loads in block:
                    self._once(loads)
                taken[repeat] = [self._once(loads) for loads in block]
            if progress is not None:
                progress((repeat + 1) / repeats)
        return [
            [Sample(loads, float(us)) for loads, us in zip(block, np.median(taken, axis=0), strict=True)]
            for block, taken in zip(blocks, times, strict=True)
        ]

    def _once(self, loads: Loads) -> float:
        ids = self._routing(loads)
        num_rows = len(ids)
        if num_rows > len(self._rows):
            self._rows = self._random.standard_normal((num_rows, self.shape.hidden), np.float32)
        rows, hidden = self._rows[:num_rows], np.zeros((num_rows, self.shape.hidden), np.float32)
        weights = np.ones(ids.shape, np.float32)
        layer = self._step % self.shape.num_layers
        self._executor.begin_step(self._step, [0] * num_rows, list(range(num_rows)))
        # Like attention in a step: the pool is awake when the layer begins, and the caches hold other weights.
        self._dense.forward(rows[:1], np.empty((1, self.shape.hidden), np.float32))
        began = self._clock() if self._clock else 0.0
        self._executor.forward(layer, rows, ids, weights, hidden)
        taken_us = (self._clock() - began) * 1e6 if self._clock else None
        self._step += 1
        events = self._executor.drain_events()["token_layer"]
        return float(events["layer_us"][0]) if taken_us is None else taken_us

    def _routing(self, loads: Loads) -> npt.NDArray[np.int32]:
        """Ids [rows, top-k] with these loads: rows are encoded once for all their experts, so their number matters.
        Loads that top-k different experts per row cannot produce get a row for each pair."""
        chosen = self._random.choice(self.shape.num_experts, len(loads), replace=False)
        pairs = np.repeat(np.sort(chosen), loads).astype(np.int32)
        num_rows, rest = divmod(len(pairs), self.shape.top_k)
        if rest or max(loads) > num_rows:
            return pairs[:, None]
        # An expert's pairs are adjacent and at most as many as rows, so no row gets an expert twice.
        return np.ascontiguousarray(pairs.reshape(self.shape.top_k, num_rows).T)


def calibrate(
    shape: MoeShape,
    threads: int,
    *,
    repeats: int = 15,
    progress: ProgressFn | None = None,
    timer: LayerTimer | None = None,
) -> Calibration:
    """Measure and fit experts of `shape` on `threads` threads (0: one per physical core). Takes up to a minute.

    Args:
        timer: an existing one of this shape, if any; its number of threads changes.
    """
    report = progress or (lambda what, share: None)
    pool = ops.ThreadPool(threads)
    timer = timer or LayerTimer(shape, pool)
    timer.use(pool)
    counts = _expert_counts(shape)
    grid = [[(n,) * k for k in counts if n * k <= _MAX_ROWS * shape.top_k or k == counts[0]] for n in TOKENS]
    mixed = list(_mixed_loads(shape))
    timed = timer.blocks(
        [*grid, *mixed], repeats, lambda share: report("layers", 0.85 * share), _LAYERS_LIMIT_S
    )
    samples = [sample for block in timed[: len(grid)] for sample in block]
    unseen = [sample for block in timed[len(grid) :] for sample in block]
    curve = fit(
        samples,
        CpuCurve(shape.format, shape.hidden, shape.intermediate, pool.num_threads, layer_us=0.0, points=()),
    )
    decode = (1,) * shape.top_k
    thread_us = {}
    for count in range(1, pool.num_threads + 1):
        report(f"{count} threads", 0.85 + 0.05 * count / pool.num_threads)
        timer.use(ops.ThreadPool(count))
        thread_us[count] = timer.time(decode, 5 * repeats)
    report("contention", 0.95)
    spare = max(1, pool.num_threads - 1)
    timer.use(ops.ThreadPool(spare))
    contention, copy_gbps = _contention(timer, decode, repeats)
    return Calibration(
        curve=curve,
        expert_bytes=_expert_bytes(shape),
        grid=tuple(replace(s, predicted_us=predict(curve, s.loads)) for s in samples),
        unseen=tuple(replace(s, predicted_us=predict(curve, s.loads)) for s in unseen),
        thread_us=thread_us,
        contention=contention,
        copy_gbps=copy_gbps,
    )


def _expert_counts(shape: MoeShape) -> list[int]:
    """Numbers of active experts to time: a layer never has fewer than top-k, and one or two small experts cannot keep
    every thread busy, which would bend the fit where no layer ever is."""
    counts = [shape.top_k]
    while counts[-1] * 2 <= shape.num_experts and len(counts) < 5:
        counts.append(counts[-1] * 2)
    return counts


def fit(samples: list[Sample], empty: CpuCurve) -> CpuCurve:
    """Least relative squares of layer(k, n) = a + k c(n) over samples of equal loads, a >= 0 and c increasing."""
    tokens = sorted({sample.loads[0] for sample in samples})
    column = {n: 1 + i for i, n in enumerate(tokens)}
    matrix = np.zeros((len(samples), 1 + len(tokens)))
    for row, sample in zip(matrix, samples, strict=True):
        row[0] = 1 / sample.measured_us
        row[column[sample.loads[0]]] = len(sample.loads) / sample.measured_us
    solution, *_ = np.linalg.lstsq(matrix, np.ones(len(samples)), rcond=None)
    if solution[0] < 0:
        rest, *_ = np.linalg.lstsq(matrix[:, 1:], np.ones(len(samples)), rcond=None)
        solution = np.concatenate([[0.0], rest])
    # More tokens never take less time, except in measurement noise.
    points = np.maximum.accumulate(np.maximum(solution[1:], 1e-3))
    return replace(
        empty,
        layer_us=float(solution[0]),
        points=tuple((n, float(us)) for n, us in zip(tokens, points, strict=True)),
    )


def predict(curve: CpuCurve, loads: Loads) -> float:
    """The cost model's prediction for a layer on the CPU with these loads, in microseconds."""
    return cpu_cost_model(curve, 1.0).cpu_us(list(loads), 0.0)


def to_profile(
    calibration: Calibration,
    base: MachineProfile,
    accelerator: Mapping[str, Figure] | None = None,
    stored: MachineProfile | None = None,
    device: str = "",
) -> MachineProfile:
    """A profile of this machine: CPU figures as measured, each with its source.

    Args:
        base: source of the figures of an accelerator that was not measured.
        accelerator: measured figures of one.
        stored: existing profile of this machine; its curves of other experts and threads are kept.
        device: name of the measured accelerator, one of several of this machine.
    """
    curve = calibration.curve
    weights = 3 * curve.hidden * curve.intermediate
    most_tokens, most_us = curve.points[-1]
    how = (
        f"measured: {curve.format} experts of {curve.hidden} x {curve.intermediate}, {curve.threads} threads"
    )
    measured = {
        "cpu_bandwidth_gbps": Figure(
            calibration.expert_bytes / curve.points[0][1] / 1e3, f"{how}, one token each"
        ),
        "cpu_gflops": Figure(2 * weights * most_tokens / most_us / 1e3, f"{how}, {most_tokens} tokens each"),
        "cpu_expert_overhead_us": Figure(0.0, "included in the measured curve"),
        "contention": Figure(
            calibration.contention,
            f"{how} less one; decode while one thread copied {calibration.copy_gbps:.1f} GB/s of memory",
        ),
    }
    measured |= accelerator or {}
    borrowed = {
        name: Figure(figure.value, f"not measured here, from {base.name}: {figure.source}")
        for name, figure in base.figures.items()
        if name not in measured
    }
    processor, date = platform.processor() or platform.machine(), time.strftime("%Y-%m-%d")
    accelerator_text = "with its own accelerator" if accelerator else f"with the accelerator of {base.name}"
    return MachineProfile(
        name="-".join(filter(None, (platform.node() or "machine", device, "" if accelerator else base.name))),
        description=f"{processor} as measured on {date}, {accelerator_text}",
        figures=borrowed | measured,
        cpu_curves=(curve, *(c for c in (stored.cpu_curves if stored else ()) if c.experts != curve.experts)),
    )


def _expert_bytes(shape: MoeShape) -> int:
    return packed_expert_bytes(shape.usual, shape.hidden, shape.intermediate, biases=shape.biases)


def random_store(shape: MoeShape, pool: ops.ThreadPool, seed: int = 0) -> _core.ExpertStore:
    """Experts of random weights, each in its own memory."""
    store = make_store(shape, pool)
    random = np.random.default_rng(seed)
    gate, up, down = shape.usual
    # Values do not affect timing, memory does: every expert has its own copy.
    expert = (
        random_matrix(random, gate, shape.intermediate, shape.hidden),
        random_matrix(random, up, shape.intermediate, shape.hidden),
        random_matrix(random, down, shape.hidden, shape.intermediate),
    )
    for layer in range(shape.num_layers):
        store.put(pool, layer, 0, [expert] * shape.num_experts)
    return store


def random_matrix(random: np.random.Generator, format: str, rows: int, columns: int) -> WeightMatrix:
    """Random bytes; elements or scales that are floats are small."""
    element = element_type(format)
    width = source_row_bytes(format, columns) // element.itemsize
    if format == "f32":
        return WeightMatrix(random.standard_normal((rows, width), np.float32), format, columns)
    # Half of all 16-bit patterns below 0x3c00 are floats below 1 in f16 as in bf16, wherever a block has them. In bf16
    # most are so small that products are subnormal: 40 times as slow where BF16 is multiplied in float32.
    lowest = 0x38 if format == "bf16" else 0
    data = random.integers(lowest, 0x3C, (rows, width * element.itemsize), np.uint8).view(element)
    if format != "fp8":
        return WeightMatrix(data, format, columns)
    grid = np.full((-(-rows // SCALE_GRID), -(-columns // SCALE_GRID)), 0.01, np.float32)
    return WeightMatrix(data, format, columns, grid)


def _mixed_loads(shape: MoeShape) -> Iterator[list[Loads]]:
    """Loads of a skewed router: batches of 1 to 256 tokens over Zipf-like experts, four of each."""
    random = np.random.default_rng(1)
    popularity = 1 / (1 + np.arange(shape.num_experts)) ** 0.7
    popularity /= popularity.sum()
    for num_tokens in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256):
        batch = []
        for _ in range(4):
            chosen = [
                random.choice(shape.num_experts, shape.top_k, replace=False, p=popularity)
                for _ in range(num_tokens)
            ]
            loads = np.bincount(np.concatenate(chosen))
            batch.append(tuple(int(n) for n in loads[loads > 0]))
        yield batch


def _contention(timer: LayerTimer, loads: Loads, repeats: int) -> tuple[float, float]:
    """(slow-down of the layer while another thread copies memory, GB/s that it copied)."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    stop = threading.Event()
    copied = [0]

    def copy() -> None:
        while not stop.is_set():
            np.copyto(target, source)  # releases the GIL
            copied[0] += source.nbytes

    slow, alone = [], []
    seconds = 0.0
    for _ in range(5):  # alternating, so that a drifting clock speed affects both alike
        alone.append(timer.time(loads, repeats))
        stop.clear()
        thread = threading.Thread(target=copy)
        began = time.perf_counter()
        thread.start()
        slow.append(timer.time(loads, 4 * repeats))
        stop.set()
        thread.join()
        seconds += time.perf_counter() - began
    return max(0.0, float(np.median(slow) / np.median(alone) - 1)), copied[0] / seconds / 1e9
