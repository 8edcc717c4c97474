"""Which GPU computes which dense layers: contiguous layers on each, divided where a token is predicted to be fastest.

The first GPU has the embedding, the first layers and the head. Moving layers to another GPU costs two transfers of the
residual stream per token, and room for experts there; it makes room for experts on the first GPU. The cost model prices
both. All layers on the first GPU is always a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.memory.budget import DeviceBudget, DeviceMemory, plan_devices
from twofold.device.memory.needs import DeviceNeeds, needs_of
from twofold.experts.device_split import requested_split
from twofold.experts.profiles import load_machine_profile, profile_of_devices
from twofold.models.sizing import ModelSize

_LEAST_GAIN = 0.002
"""A division must be faster than one with fewer transfers by this share; below it the figures decide nothing."""


def plan_machine(
    config: EngineConfig, size: ModelSize, names: Sequence[str], memories: Sequence[DeviceMemory]
) -> tuple[DeviceNeeds, DeviceBudget]:
    """Needs of a model of this size, and the budget of the devices of these names.

    Raises:
        ConfigError: it does not fit, or --tensor-split is not for these devices.
    """
    needs = needs_of(size)
    if len(memories) == 1:
        return needs, plan_devices(config, needs, memories)
    routed = size.config.routed
    machine = profile_of_devices(load_machine_profile(config.machine_profile), names)
    cost = _core.CostModel(
        machine.native(),
        max(1, size.one_expert_bytes),
        6.0 * routed.hidden_size * max(1, routed.intermediate_size),
    )
    shares = requested_split(config.tensor_split, names)
    return needs, plan_pipeline(config, needs, memories, shares, cost)


def plan_pipeline(
    config: EngineConfig,
    needs: DeviceNeeds,
    memories: Sequence[DeviceMemory],
    shares: tuple[float, ...],
    cost: _core.CostModel,
) -> DeviceBudget:
    """The budget with the layers divided among the GPUs. shares, memories: as `plan_devices` takes them.

    Raises:
        ConfigError: no division fits; the message is that for all layers on the first GPU.
    """
    num_devices, num_layers = len(memories), len(needs.layers)
    best: tuple[float, DeviceBudget] | None = None
    refusal: ConfigError | None = None

    def try_ends(ends: Sequence[int]) -> bool:
        nonlocal best, refusal
        if any(layer.state_layer < end for end in ends for layer in needs.layers[end:]):
            return False  # a layer would be parted from the one whose state it reads
        homes = tuple(
            device for device, (begin, end) in enumerate(pairwise([0, *ends])) for _ in range(begin, end)
        )
        try:
            budget = plan_devices(config, needs, memories, shares, homes)
        except ConfigError as error:
            refusal = refusal or error
            return False
        us = token_us(needs, budget, homes, cost)
        if best is not None and us >= best[0] * (1 - _LEAST_GAIN):
            return False
        best = us, budget
        return True

    # Ends of each GPU's layers; the last one is the number of layers.
    alone = [num_layers] * num_devices
    try_ends(alone)
    total = sum(memory.free_bytes for memory in memories)
    sums = [sum(memory.free_bytes for memory in memories[: n + 1]) for n in range(num_devices)]
    spread = [round(num_layers * each / total) for each in sums]
    for begin in (alone, spread):
        ends, improved = list(begin), True
        try_ends(ends)
        while improved:
            improved = False
            for candidate in _one_end_moved(ends):
                if try_ends(candidate):
                    ends, improved = candidate, True
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _one_end_moved(ends: Sequence[int]) -> Iterator[list[int]]:
    """All divisions in which one GPU's layers end elsewhere, and those of others as far as they must."""
    for device in range(len(ends) - 1):
        for end in range(ends[-1] + 1):
            before = [min(other, end) for other in ends[:device]]
            yield [*before, end, *(max(other, end) for other in ends[device + 1 :])]


def token_us(needs: DeviceNeeds, budget: DeviceBudget, homes: Sequence[int], cost: _core.CostModel) -> float:
    """Predicted time of a decoded token, in microseconds, without the head: dense weights read, transfers between GPUs,
    experts in slots in proportion to each GPU's slots, all others on the CPU."""
    hits = _rounded([needs.top_k * gpu.num_slots / max(budget.num_experts, 1) for gpu in budget.gpus])
    experts = {
        home: cost.machine_layer_us(hits, max(needs.top_k - sum(hits), 0), home) for home in set(homes)
    }
    path = [0, *homes, 0]
    us = sum(cost.exchange_us(before, after) for before, after in pairwise(path))
    for layer, home in zip(needs.layers, homes, strict=True):
        us += cost.memory_us(home, layer.dense_bytes) + (experts[home] if layer.has_experts else 0.0)
    return us


def _rounded(amounts: Sequence[float]) -> list[int]:
    """Whole numbers with the rounded sum, each less than one from its amount."""
    whole = [int(amount) for amount in amounts]
    missing = round(sum(amounts)) - sum(whole)
    order = sorted(range(len(amounts)), key=lambda n: whole[n] - amounts[n])
    for n in order[:missing]:
        whole[n] += 1
    return whole
