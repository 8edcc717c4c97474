"""Memory of one model among several that may be loaded at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.fit.plan import FitPlan, Machine, plan_fit
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import WORKING_BYTES, ModelSize, measure_files
from twofold.step.capacity import longest_request

_LEAST_SHARE = 8
"""A model gets at least this part of the memory beside its weights, although the others' weights may not fit then."""
_SNAPSHOTS_SHARE = 8
_CONTEXTS = 8


def weight_bytes(files: ModelFiles) -> int:
    """Host memory of a model's weights."""
    return measure_files(files).host_bytes(0) - WORKING_BYTES


def memory_share(own: int, weights: Sequence[int], budget: int, most: int | None) -> int:
    """Memory for a model: its weights, and an equal part of what the largest `most` models' weights leave.

    own: bytes of its weights. weights: those of all models. most: models loaded at the same time; None: no limit.
    """
    largest = sorted(weights, reverse=True)[:most]
    rest = (budget - sum(largest)) // max(1, len(largest))
    return min(budget, own + max(rest, budget // _LEAST_SHARE))


def fit_among_several(
    config: EngineConfig, given: Collection[str], files: ModelFiles, machine: Machine, share: int
) -> tuple[EngineConfig, int]:
    """The configuration of a model that takes about `share` bytes of host memory, and the bytes it takes.

    Raises:
        ConfigError: it does not fit; the message says what would.
    """
    size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
    if config.snapshot_bytes is None and size.bytes_per_sequence:
        room = max(0, share - (size.host_bytes(0) - WORKING_BYTES))
        config = dataclasses.replace(config, snapshot_bytes=room // _SNAPSHOTS_SHARE)
    reserved = (config.snapshot_bytes or 0) + size.bytes_per_sequence
    machine = dataclasses.replace(machine, host_bytes=share + WORKING_BYTES - reserved)
    if not config.auto_fit:
        return _unfitted(config, size, share, reserved)
    plan = plan_fit(config, given, files, machine)
    if not plan.fits:
        would = f"; would fit: {plan.remedies[0]}" if plan.remedies else ""
        raise ConfigError(plan.problem + would)
    return plan.config, _bytes_of(plan) + reserved


def _bytes_of(plan: FitPlan) -> int:
    tokens = plan.config.max_total_tokens or plan.context
    slots = plan.num_slots if plan.machine.accelerator.startswith("emulated") else 0
    kv_tokens = 0 if plan.machine.accelerator.startswith("cuda") else tokens
    return plan.size.host_bytes(kv_tokens) - WORKING_BYTES + slots * plan.size.one_expert_bytes


def _unfitted(config: EngineConfig, size: ModelSize, share: int, reserved: int) -> tuple[EngineConfig, int]:
    """As --no-auto-fit asks: eight full contexts, or as many tokens as its memory holds."""
    room = (share + WORKING_BYTES - reserved - size.host_bytes(0)) // max(1, size.kv_bytes_per_token)
    tokens = config.max_total_tokens or min(_CONTEXTS * longest_request(config, size.config), room)
    if tokens > max(room, 0) or tokens < config.page_size:
        raise ConfigError(
            f"the model's weights and a KV cache of {max(tokens, config.page_size)} tokens do not fit into "
            f"{share / 2**30:.2f} GiB; would fit: --max-total-tokens {max(room, 0)}"
        )
    taken = size.host_bytes(tokens) - WORKING_BYTES + reserved
    return dataclasses.replace(config, max_total_tokens=tokens), taken
