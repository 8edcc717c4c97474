"""Graphics cards by name, in a given computer: their machine profiles, and how sure an answer about them is.

Sizes and rates are the makers' data sheets. What software reaches of them is taken from the shipped profiles: 84 % of
the memory's rate, two thirds of the tensor cores' dense FP16 rate with FP32 accumulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from twofold.experts.profiles import Figure, MachineProfile
from twofold.tools.lab.shapes import ModelShape
from twofold.tools.lab.trace import Trace, make_trace

_GIB_GB: Final = 1024**3 / 1e9
_DRIVER_GB: Final = 0.6
"""Memory that the driver and CUDA's context take."""
_LINK_GBPS: Final[Mapping[int, float]] = {3: 12.3, 4: 25.0, 5: 53.0}
"""Measured rate of 16 lanes by PCIe generation."""

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Card:
    """A graphics card as its maker describes it."""

    name: str
    vram_gib: float
    memory_gbps: float
    tflops: float
    """Dense FP16 on tensor cores with FP32 accumulation."""
    pcie: int
    """Generation of its link."""
    lanes: int = 16

    @property
    def usable_gb(self) -> float:
        """Memory for the model and its caches, in units of 1e9 bytes."""
        return self.vram_gib * _GIB_GB - _DRIVER_GB

    @property
    def title(self) -> str:
        return f"{self.name} {self.vram_gib:g} GB"


# fmt: off
CARDS: Final = (
    Card("RTX 3070",          8,  448,  40.6, 4),
    Card("RTX 4060",          8,  272,  30.2, 4, 8),
    Card("RTX 2080 Ti",      11,  616,  53.8, 3),
    Card("RTX 3060",         12,  360,  25.5, 4),
    Card("RTX 4070",         12,  504,  58.3, 4),
    Card("RTX 5070",         12,  672,  61.7, 5),
    Card("RTX 4060 Ti",      16,  288,  44.1, 4, 8),
    Card("RTX 5060 Ti",      16,  448,  47.4, 5, 8),
    Card("RTX 4080 Super",   16,  736, 104.4, 4),
    Card("RTX 5080",         16,  960, 112.6, 5),
    Card("RTX 4000 Ada",     20,  360,  53.4, 4),
    Card("RTX 3090",         24,  936,  71.2, 4),
    Card("RTX 4090",         24, 1008, 165.2, 4),
    Card("RTX 5090",         32, 1792, 209.5, 5),
)
"""Cards of 8 to 32 GB, by memory, then by its rate."""
# fmt: on

HOSTS: Final[Mapping[str, str]] = {
    "8-core desktop, two channels of DDR4-3200": "rtx3060-pcie3",
    "16-core desktop, two channels of DDR5-5600": "rtx4090-pcie4",
    "16 cores of a server with DDR5": "h200-pcie5",
}
"""Computers without their card, and the shipped profile that describes them."""


def pcie_of(host: MachineProfile) -> int:
    """Generation of the computer's slot, by the rate that its profile has."""
    rate = host.figures["link_bandwidth_gbps"].value
    return min(_LINK_GBPS, key=lambda generation: abs(_LINK_GBPS[generation] - rate))


def with_card(host: MachineProfile, card: Card, *, pcie: int) -> MachineProfile:
    """The computer `host` with this card in a slot of PCIe generation `pcie`."""
    link = _LINK_GBPS[min(pcie, card.pcie)] * card.lanes / 16
    figures = {
        "vram_bandwidth_gbps": 0.84 * card.memory_gbps,
        "gpu_gflops": card.tflops * 1e3 * 2 / 3,
        "link_bandwidth_gbps": link,
        "vram_gb": card.usable_gb,
    }
    replaced = {name: Figure(value, f"data sheet of {card.name}") for name, value in figures.items()}
    return MachineProfile(
        card.title, f"{card.title} in {host.name}", {**host.figures, **replaced}, host.cpu_curves
    )


def routing_like(trace: Trace, shape: ModelShape, *, seed: int = 0) -> Trace:
    """Drawn routing for another model: as skewed as the recorded one, with as many repeats from token to token.

    A layer takes the sorted popularity of the recorded layer at its relative depth, interpolated to the other model's
    experts. Everything else of the other model's routing is unknown, so predictions from it are less certain.
    """
    layers, experts, top_k = shape.routing
    draw = np.random.default_rng(seed)
    usage = np.sort(np.array(trace.usage()).reshape(trace.num_layers, -1) + 1e-3, axis=1)[:, ::-1]
    repeats = _repeats(trace)
    popularity = np.empty((layers, experts))
    kept = np.empty(layers)
    for layer in range(layers):
        source = layer * trace.num_layers // layers
        at = np.linspace(0, trace.num_experts - 1, experts)
        popularity[layer] = draw.permutation(np.interp(at, np.arange(trace.num_experts), usage[source]))
        kept[layer] = repeats[source]
    score = np.log(popularity)
    ids = np.empty((trace.num_tokens, layers, top_k), np.int64)
    for token in range(trace.num_tokens):
        keys = score + draw.gumbel(size=score.shape)
        if token:
            stays = draw.random((layers, top_k)) < kept[:, None]
            rows = np.broadcast_to(np.arange(layers)[:, None], stays.shape)[stays]
            keys[rows, ids[token - 1][stays]] += 1e6
        ids[token] = np.argsort(-keys, axis=1, kind="stable")[:, :top_k]
    drawn = make_trace(shape.name, ids, None, trace.offsets, num_experts=experts)
    return dataclasses.replace(drawn, sizes=None)


def _repeats(trace: Trace) -> NDArray[np.float64]:
    """Share of a token's experts that the token before it used too, [layers]."""
    if trace.num_tokens < 2:
        return np.zeros(trace.num_layers)
    now, before = trace.ids[1:, :, :, None], trace.ids[:-1, :, None, :]
    found: NDArray[np.float64] = (now == before).any(axis=3).mean(axis=(0, 2))
    return found


@dataclass(frozen=True)
class Basis:
    """What a prediction rests on."""

    is_own_model: bool
    """The routing is that of the recorded model."""
    is_calibrated: bool
    """The computer's figures were measured on it."""
    num_tokens: int

    def confidence(self, predicted: float, wanted: float) -> tuple[Confidence, Sequence[str]]:
        """How sure it is that `wanted` is reached, and why.

        Predictions of the CPU alone were within 21 % of the measured speed in all rounds of the notebook; none of a GPU
        has been compared with hardware.
        """
        margin = predicted / wanted - 1
        reasons = [
            f"{margin:+.0%} to the wanted speed",
            "the computer's figures were measured on it"
            if self.is_calibrated
            else "the computer's figures are estimates of a typical one",
            f"routing of {self.num_tokens:,} recorded tokens"
            if self.is_own_model
            else "routing drawn after another model's",
            "the card's figures are its data sheet's",
        ]
        if not self.is_own_model or margin < 0.25 or self.num_tokens < 100:
            return "low", reasons
        return ("high" if self.is_calibrated and margin >= 1.0 else "medium"), reasons
