"""Measures and fits the cost model's constants for an accelerator and its link.

Works on a `DeviceProbe`: the real device, the tests' fake one, or known figures; imports neither torch nor CUDA.
The fit: an upload takes a + W / B_link, a layer of hits g + sum of max(W / B_vram, F n / P) over its experts. Residuals
and held-out layers show how well the fit matches the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from twofold.experts.calibration import LayerTimer, Loads, Predicted, ProgressFn, Sample
from twofold.experts.profiles import Figure
from twofold.experts.slot_plan import MoeShape

LINK_BYTES: Final = tuple(1 << power for power in range(16, 28))
"""Copy sizes: 64 KiB, where latency dominates, to 128 MiB."""
DECODE_TOKENS: Final = (1, 2, 4, 8, 16, 32)
PREFILL_TOKENS: Final = (64, 256, 1024, 4096)
_FIT_ROUNDS: Final = 50


class CopyCounter(Protocol):
    """Copies made in the background of another measurement."""

    @property
    def gbps(self) -> float: ...


class DeviceProbe(Protocol):
    """Times single operations on one accelerator, in microseconds."""

    @property
    def name(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def expert_bytes(self) -> int:
        """Size of one expert as uploaded and read."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest layer to time."""

    def copy_us(self, num_bytes: int) -> float:
        """One copy from pinned memory to the device."""

    def routed_us(self, routing: Routing) -> float:
        """A layer with all experts in slots, without the join."""

    def join_us(self) -> float:
        """Adding the CPU's and the device's partial results of a decode layer."""

    def handshake_us(self) -> float:
        """Handing a layer to the CPU and receiving its answer, with no work in between."""

    def copying(self, num_bytes: int) -> AbstractContextManager[CopyCounter]:
        """Copies of that size run back to back until the context ends."""


@dataclass(frozen=True)
class Routing:
    """The tokens' routed experts in one layer."""

    ids: tuple[tuple[int, ...], ...]
    """[tokens][top_k], counted from 0; the probe shifts the ids so that every call uses other experts."""

    @property
    def loads(self) -> Loads:
        """Tokens per active expert."""
        counts = np.bincount(np.array(self.ids).reshape(-1))
        return tuple(int(n) for n in counts[counts > 0])


@dataclass(frozen=True)
class LinkSample(Predicted):
    """Timed copies of one size."""

    num_bytes: int
    measured_us: float
    """Median over the repeats."""
    predicted_us: float = 0.0


@dataclass(frozen=True)
class DeviceCalibration:
    """Measurements of a device and the quality of the fit."""

    name: str
    memory_bytes: int
    expert_bytes: int
    link_latency_us: float
    link_bandwidth_gbps: float
    link: tuple[LinkSample, ...]
    gpu_launch_us: float
    vram_bandwidth_gbps: float
    gpu_gflops: float
    layers: tuple[Sample, ...]
    """Layers that the accelerator's constants were fitted to."""
    unseen: tuple[Sample, ...]
    """Held-out layers with mixed loads."""
    handshake_us: float
    join_us: float
    contention: float
    """Slow-down of the CPU's decode layers during uploads."""
    copy_gbps: float
    """Upload rate meanwhile."""

    @property
    def median_error(self) -> float:
        return float(np.median([sample.error for sample in self.unseen]))

    def figures(self, cpu_layer_us: float) -> dict[str, Figure]:
        """The profile's figures. `cpu_layer_us`: time to hand a layer to the pool, a part of the handshake."""
        how = f"measured on {self.name}"
        experts = f"{how}, fitted to {len(self.layers)} kinds of layers of {self.expert_bytes} byte experts"
        copies = f"{how}, fitted to copies of {len(self.link)} sizes"
        return {
            "handshake_us": Figure(
                self.handshake_us + cpu_layer_us,
                f"{how}: {self.handshake_us:.2f} us device to CPU and back, {cpu_layer_us:.2f} us thread pool",
            ),
            "gpu_launch_us": Figure(self.gpu_launch_us, experts),
            "vram_bandwidth_gbps": Figure(self.vram_bandwidth_gbps, experts),
            "gpu_gflops": Figure(self.gpu_gflops, experts),
            "link_latency_us": Figure(self.link_latency_us, copies),
            "link_bandwidth_gbps": Figure(self.link_bandwidth_gbps, copies),
            "contention": Figure(
                self.contention,
                f"{how}: decode layers on the CPU beside uploads of {self.copy_gbps:.1f} GB/s",
            ),
            "join_us": Figure(self.join_us, how),
            "vram_gb": Figure(self.memory_bytes / 1e9, how),
        }


def calibrate_device(
    probe: DeviceProbe,
    shape: MoeShape,
    cpu: LayerTimer | None,
    *,
    repeats: int = 15,
    progress: ProgressFn | None = None,
) -> DeviceCalibration:
    """Measure and fit. `cpu` computes during the uploads; without it contention is 0."""
    report = progress or (lambda what, share: None)
    expert_bytes, most_tokens = probe.expert_bytes, probe.most_tokens
    sizes = sorted({*LINK_BYTES, expert_bytes})
    report("link", 0.0)
    copies = _interleaved([lambda size=size: probe.copy_us(size) for size in sizes], repeats)  # type: ignore[misc]
    link = [LinkSample(size, us) for size, us in zip(sizes, copies, strict=True)]
    latency_us, bandwidth_gbps = fit_link(link)
    grid = list(_even_routings(shape, most_tokens))
    mixed = list(_mixed_routings(shape, most_tokens))
    report("accelerator", 0.2)
    times = _interleaved([lambda r=r: probe.routed_us(r) for r in grid + mixed], repeats)  # type: ignore[misc]
    samples = [Sample(r.loads, us) for r, us in zip(grid + mixed, times, strict=True)]
    constants = fit_layers(samples[: len(grid)])
    estimated = [replace(s, predicted_us=constants.layer_us(s.loads)) for s in samples]
    report("handshake", 0.8)
    handshake_us, join_us = probe.handshake_us(), float(np.median(_times(probe.join_us, repeats)))
    report("contention", 0.9)
    contention, copy_gbps = _contention(probe, cpu, expert_bytes, shape.top_k, repeats) if cpu else (0.0, 0.0)
    flops = 6.0 * shape.hidden * shape.intermediate
    return DeviceCalibration(
        name=probe.name,
        memory_bytes=probe.memory_bytes,
        expert_bytes=expert_bytes,
        link_latency_us=latency_us,
        link_bandwidth_gbps=bandwidth_gbps,
        link=tuple(replace(s, predicted_us=latency_us + s.num_bytes / bandwidth_gbps / 1e3) for s in link),
        gpu_launch_us=constants.launch_us,
        vram_bandwidth_gbps=expert_bytes / constants.expert_us / 1e3,
        gpu_gflops=flops / constants.token_us / 1e3,
        layers=tuple(estimated[: len(grid)]),
        unseen=tuple(estimated[len(grid) :]),
        handshake_us=handshake_us,
        join_us=join_us,
        contention=contention,
        copy_gbps=copy_gbps,
    )


def fit_link(samples: Sequence[LinkSample]) -> tuple[float, float]:
    """(latency_us, bandwidth_gbps) of least relative squares, latency >= 0."""
    matrix = np.array([[1.0, s.num_bytes] for s in samples])
    latency, per_byte = _least_relative_squares(matrix, np.array([s.measured_us for s in samples]))
    return latency, 1 / max(per_byte, 1e-12) / 1e3


@dataclass(frozen=True)
class LayerConstants:
    """A layer of hits takes launch_us + sum over its experts of max(expert_us, tokens * token_us)."""

    launch_us: float
    expert_us: float
    token_us: float

    def layer_us(self, loads: Loads) -> float:
        return self.launch_us + sum(max(self.expert_us, n * self.token_us) for n in loads)


def fit_layers(samples: Sequence[Sample]) -> LayerConstants:
    """Constants of least relative squares, none negative.

    Which experts are bound by weight reads and which by arithmetic is unknown. So from several starts, each expert is
    assigned by the current constants and these are fitted again, until the assignment is stable.
    """
    measured = np.array([s.measured_us for s in samples])
    most = max(max(s.loads) for s in samples)
    starts = {
        1.5,
        *itertools.accumulate(itertools.repeat(2.0, int(np.log2(2 * most)) + 1), lambda a, b: a * b),
    }
    best, least = LayerConstants(0.0, 1e-3, 1e-6), np.inf
    for crossover in sorted(starts):
        for _ in range(_FIT_ROUNDS):
            columns = [
                (
                    1.0,
                    float(sum(n < crossover for n in s.loads)),
                    float(sum(n for n in s.loads if n >= crossover)),
                )
                for s in samples
            ]
            launch, expert, token = _least_relative_squares(np.array(columns), measured)
            # With no sample on one side of the crossover, all that is known is the other side.
            expert = expert or crossover * token
            token = token or expert / (2 * most)
            if expert <= 0 or token <= 0:
                break
            found = LayerConstants(launch, expert, token)
            loss = float(sum((found.layer_us(s.loads) / s.measured_us - 1) ** 2 for s in samples))
            if loss < least:
                best, least = found, loss
            if crossover == expert / token:
                break
            crossover = expert / token
    return best


def _least_relative_squares(matrix: np.ndarray, measured: np.ndarray) -> tuple[float, ...]:
    """x >= 0 that minimises sum((matrix x / measured - 1)^2); variables that would be negative are 0."""
    scaled = matrix / measured[:, None]
    used = [c for c in range(matrix.shape[1]) if matrix[:, c].any()]
    while used:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(measured)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(np.argmin(found * scaled[:, used].mean(axis=0))))
    out = np.zeros(matrix.shape[1])
    if used:
        out[used] = found
    return tuple(float(x) for x in out)


def _even_routings(shape: MoeShape, most_tokens: int) -> Iterator[Routing]:
    """Every token count, with its pairs spread evenly over few to many experts."""
    for num_tokens in (*DECODE_TOKENS, *PREFILL_TOKENS):
        if num_tokens > most_tokens:
            return
        active = shape.top_k
        while active <= min(shape.num_experts, num_tokens * shape.top_k):
            pairs = np.arange(num_tokens * shape.top_k) % active
            yield _routing(pairs.reshape(num_tokens, shape.top_k))
            active *= 2


def _mixed_routings(shape: MoeShape, most_tokens: int) -> Iterator[Routing]:
    """Uneven loads, as from a router with popular experts."""
    random = np.random.default_rng(1)
    popularity = 1 / (1 + np.arange(shape.num_experts)) ** 0.7
    popularity /= popularity.sum()
    for num_tokens in (1, 2, 3, 5, 8, 13, 24, 32, 96, 384, 2048):
        if num_tokens > most_tokens:
            return
        for _ in range(3):
            yield _routing(
                np.array(
                    [
                        random.choice(shape.num_experts, shape.top_k, replace=False, p=popularity)
                        for _ in range(num_tokens)
                    ]
                )
            )


def _routing(ids: np.ndarray) -> Routing:
    return Routing(tuple(tuple(int(i) for i in row) for row in ids))


def _times(measure: Callable[[], float], repeats: int) -> list[float]:
    return [measure() for _ in range(repeats)]


def _interleaved(measures: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Medians of interleaved repeats, so that clock drift affects all alike. The first round is warm-up."""
    times = np.array([[measure() for measure in measures] for _ in range(repeats + 1)])
    return [float(us) for us in np.median(times[1:], axis=0)]


def _contention(
    probe: DeviceProbe, cpu: LayerTimer, expert_bytes: int, top_k: int, repeats: int
) -> tuple[float, float]:
    """(slow-down of the CPU's decode layer during uploads, upload rate in GB/s)."""
    loads = (1,) * top_k
    alone, slow, gbps = [], [], []
    for _ in range(5):
        alone.append(cpu.time(loads, repeats))
        with probe.copying(expert_bytes) as copied:
            slow.append(cpu.time(loads, 4 * repeats))
        gbps.append(copied.gbps)
    return max(0.0, float(np.median(slow) / np.median(alone) - 1)), float(np.median(gbps))
