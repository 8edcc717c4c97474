"""Decisions of the scheduler by layer: plans chosen, and predicted against measured times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twofold.telemetry.queries.layer_rows import LayerRows, StepLayers

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def plan_mix(layers: StepLayers) -> I64:
    """How often layers of decode steps with m misses fetched f of them: [misses + 1, fetched + 1]."""
    decode = layers.is_decode
    fetched = layers.num_fetched[decode]
    misses = fetched + layers.num_cpu[decode]
    size = int(misses.max(initial=0)) + 1
    counts = np.zeros((size, size), np.int64)
    np.add.at(counts, (misses, fetched), 1)
    return counts


@dataclass(frozen=True)
class UsualPlan:
    """Plans for one number of hits and misses, among layers of decode steps."""

    num_hits: int
    num_misses: int
    num_layers: int
    """How often these hits and misses occurred."""
    fetched: I64
    """[misses + 1]: how often 0, 1, … of the misses were fetched."""
    median_us: F64
    """[misses + 1]: median layer time on the run's clock; NaN where never chosen."""


def usual_plans(layers: StepLayers, *, limit: int = 12) -> list[UsualPlan]:
    """The most frequent combinations of hits and misses, with at least one miss."""
    decode = layers.is_decode & (layers.num_fetched + layers.num_cpu > 0)
    hits, fetched = layers.num_hits[decode], layers.num_fetched[decode]
    misses = fetched + layers.num_cpu[decode]
    took = layers.layer_us[decode]
    pairs, counts = np.unique(np.stack([hits, misses]), axis=1, return_counts=True)
    found = []
    for at in np.argsort(-counts, kind="stable")[:limit].tolist():
        own = (hits == pairs[0, at]) & (misses == pairs[1, at])
        num = int(pairs[1, at])
        times = [took[own & (fetched == k)] for k in range(num + 1)]
        found.append(
            UsualPlan(
                int(pairs[0, at]),
                num,
                int(counts[at]),
                np.bincount(fetched[own], minlength=num + 1).astype(np.int64),
                np.array([np.median(each) if len(each) else np.nan for each in times]),
            )
        )
    return found


@dataclass(frozen=True)
class LayerResiduals:
    """Measured / predicted − 1 by layer, percentiles over steps; arrays are [layers], NaN without predictions."""

    num_layers_measured: int
    p10: F64
    p50: F64
    p90: F64


def layer_residuals(layers: StepLayers, num_layers: int) -> LayerResiduals:
    known = (layers.predicted_us > 0) & (layers.layer_us > 0)
    error = layers.layer_us[known] / layers.predicted_us[known] - 1.0
    percentiles = np.full((3, num_layers), np.nan)
    for layer in np.unique(layers.layer[known]).tolist():
        percentiles[:, layer] = np.percentile(error[layers.layer[known] == layer], (10, 50, 90))
    return LayerResiduals(int(known.sum()), *percentiles)


@dataclass(frozen=True)
class SlowLayer:
    """One layer of one step that took many times the median of its layer."""

    step: int
    layer: int
    layer_us: float
    median_us: float

    @property
    def ratio(self) -> float:
        return self.layer_us / self.median_us


def slow_layers(rows: LayerRows, *, at_least: float = 5.0, limit: int = 20) -> list[SlowLayer]:
    """Layers of decode steps that took `at_least` times the median of their layer, slowest first."""
    layers = rows.layers
    decode = np.flatnonzero(layers.is_decode & (layers.layer_us > 0))
    median = np.full(rows.num_layers, np.nan)
    for layer in np.unique(layers.layer[decode]).tolist():
        median[layer] = np.median(layers.layer_us[decode][layers.layer[decode] == layer])
    ratio = layers.layer_us[decode] / median[layers.layer[decode]]
    slowest = np.argsort(-ratio, kind="stable")[:limit]
    return [
        SlowLayer(
            int(layers.step[i]),
            int(layers.layer[i]),
            float(layers.layer_us[i]),
            float(median[layers.layer[i]]),
        )
        for i in decode[slowest[ratio[slowest] >= at_least]]
    ]


@dataclass(frozen=True)
class CpuBandwidth:
    """Expert weights that the CPU read per second of its experts' time, in decode steps; GB/s, NaN where unknown."""

    gbps: float
    by_layer: F64
    """[layers], median over steps."""
    at_s: F64
    """[buckets] Unix time."""
    over_time: F64
    """[buckets]"""


def cpu_bandwidth(rows: LayerRows, expert_bytes: int, *, max_buckets: int = 120) -> CpuBandwidth:
    """Distinct experts on the CPU × bytes of one / time of the CPU's part, which includes handing out the work.

    Where no accelerator ran, the CPU's part is the layer.
    """
    layers, steps = rows.layers, rows.steps
    took = np.where(layers.cpu_us > 0, layers.cpu_us, np.where(layers.gpu_us > 0, 0.0, layers.layer_us))
    known = layers.is_decode & (layers.num_cpu > 0) & (took > 0)
    num_bytes, took = layers.num_cpu[known] * float(expert_bytes), took[known]
    rate = num_bytes / took / 1e3
    by_layer = np.full(rows.num_layers, np.nan)
    for layer in np.unique(layers.layer[known]).tolist():
        by_layer[layer] = np.median(rate[layers.layer[known] == layer])
    num = min(max_buckets, len(steps))
    bucket = np.searchsorted(steps.step, layers.step[known]) * num // max(1, len(steps))
    with np.errstate(divide="ignore", invalid="ignore"):
        over_time = np.bincount(bucket, num_bytes, num) / np.bincount(bucket, took, num) / 1e3
    first = np.searchsorted(np.arange(len(steps)) * num // max(1, len(steps)), np.arange(num))
    total = float(num_bytes.sum() / took.sum() / 1e3) if len(took) else float("nan")
    return CpuBandwidth(total, by_layer, steps.started_s[first] if num else np.zeros(0), over_time)
