"""Machines of several devices in `twofold lab simulate`: all devices together, each alone, and a static split.

The static split is `--tensor-split` of other engines: contiguous layers on each device, with their attention. The most
used experts of a layer are in its device's slots, all others on the CPU, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from twofold import _core
from twofold.experts.device_split import split_slots
from twofold.experts.profiles import MachineProfile
from twofold.tools.lab.shapes import ModelShape
from twofold.tools.lab.trace import Trace, make_trace

_STATIC: Final[Mapping[str, Any]] = {"policy": "static", "fetch_rule": "none", "background_uploads": False}


@dataclass(frozen=True)
class Steps:
    """How a trace is played: `batch` sequences at once, or each as a prompt in chunks of `prompt_chunk` tokens."""

    batch: int = 1
    prompt_chunk: int = 0


def systems_of_devices(
    trace: Trace,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    num_slots: int,
    split: Sequence[float],
    steps: Steps,
    prior_usage: Sequence[float],
    options: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, int, Any]]:
    """(system, number of its slots, core's SimulationResult or `Split`) of everything that is compared.

    options: of the scheduler, for all devices together and for each alone.
    """
    slots = split_slots(num_slots, split, trace.num_layers * trace.num_experts)

    def play(name: str, profile: MachineProfile, slots: Sequence[int]) -> tuple[str, int, Any]:
        result = _core.simulate(
            trace.native,
            steps.batch,
            shape.cost_model(profile),
            _core.SchedulerConfig(
                trace.num_layers,
                trace.num_experts,
                trace.top_k,
                list(slots),
                prior_usage=list(prior_usage),
                **(options or {}),
            ),
            dense_us=shape.dense_us(profile, trace.num_layers),
            token_us=shape.dense_token_us(profile, trace.num_layers),
            prompt_chunk=steps.prompt_chunk,
        )
        return name, sum(slots), result

    yield play("twofold", machine, slots)
    for number, device in enumerate(machine.devices):
        yield play(f"device {number} alone: {device.name}", device, [slots[number]])
    yield "static split by layers", sum(slots), static_split(trace, shape, machine, slots, steps, prior_usage)


@dataclass
class Split:
    """Sums over the devices' layers, named as in the core's SimulationResult."""

    num_tokens: int
    num_hits: int = 0
    num_cpu: int = 0
    num_fetched: int = 0
    num_uploads: int = 0
    total_us: float = 0.0
    moe_us: float = 0.0
    link_us: float = 0.0

    def add(self, part: Any) -> None:
        """Add one device's layers, which run after those of the devices before it."""
        for name in ("num_hits", "num_cpu", "num_fetched", "num_uploads", "total_us", "moe_us", "link_us"):
            setattr(self, name, getattr(self, name) + getattr(part, name))


def layer_shares(num_layers: int, slots: Sequence[int]) -> list[range]:
    """Contiguous layers of each device, in proportion to its slots; evenly if there are none."""
    weights = np.array(slots, float) if sum(slots) else np.ones(len(slots))
    ends = np.rint(np.cumsum(weights) / weights.sum() * num_layers).astype(int)
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def static_split(
    trace: Trace,
    shape: ModelShape,
    machine: MachineProfile,
    slots: Sequence[int],
    steps: Steps,
    prior_usage: Sequence[float],
) -> Split:
    """Play the trace with layers, attention and slots split once. The transfer between devices is left out."""
    usage = np.array(prior_usage, float).reshape(trace.num_layers, trace.num_experts)
    total = Split(num_tokens=len(trace.ids))
    for layers, device, own in zip(
        layer_shares(trace.num_layers, slots), machine.devices, slots, strict=True
    ):
        if not layers:
            continue
        part = make_trace(
            trace.name,
            trace.ids[:, layers.start : layers.stop],
            None,
            trace.offsets,
            num_experts=trace.num_experts,
        )
        dense_us = shape.dense_us(device, len(layers))
        if layers.stop < trace.num_layers:
            dense_us[-1] = 0.0  # the head is on the last device
        total.add(
            _core.simulate(
                part.native,
                steps.batch,
                shape.cost_model(device),
                _core.SchedulerConfig(
                    len(layers),
                    trace.num_experts,
                    trace.top_k,
                    min(own, len(layers) * trace.num_experts),
                    prior_usage=usage[layers.start : layers.stop].ravel().tolist(),
                    **_STATIC,
                ),
                dense_us=dense_us,
                token_us=shape.dense_token_us(device, len(layers)),
                prompt_chunk=steps.prompt_chunk,
            )
        )
    return total
