"""Checks whether a new memory split fits where expert slots and KV cache are both in host memory."""

from __future__ import annotations

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.control import MemorySplit
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.experts.accelerator import num_slots
from twofold.experts.moe import MoeRuntime
from twofold.experts.pins import check_pins, usable_slots
from twofold.models import ModelFiles
from twofold.step.capacity import longest_request
from twofold.step.runner import Planner
from twofold.weights.host_memory import available_memory_bytes


def host_planner(files: ModelFiles, moe: MoeRuntime, kv_cache: ops.StateCache, page_bytes: int) -> Planner:
    """Planner for a model on the CPU with its experts on the CPU or on an emulated accelerator."""
    model = files.config
    num_layers, stride = len(model.moe_layers), _core.slot_stride(moe.expert_bytes)

    def plan(requested: EngineConfig, num_used: int) -> MemorySplit:
        assert requested.max_total_tokens is not None, "a resize names the number of tokens"
        slots = 0
        if moe.choice.kind != "none":
            slots = num_slots(requested, num_layers, model.routed.num_experts, stride)
            check_pins(moe.plan.devices, slots, num_layers, model.routed.num_experts)
            slots = min(slots, usable_slots(moe.plan.devices, num_layers, model.routed.num_experts))
        pages = requested.max_total_tokens // requested.page_size
        if pages < 1:
            raise ConfigError(
                f"--max-total-tokens was given {requested.max_total_tokens}, less than one page "
                f"of {requested.page_size} tokens; give at least that"
            )
        # Growth, plus the pages that exist twice while they move.
        grown = max(pages - kv_cache.num_pages, 0)
        moved = min(num_used, pages) if pages != kv_cache.num_pages else 0
        more_slots = max(slots * stride - moe.executor.device_bytes, 0)
        free = available_memory_bytes()
        if more_slots > free:
            raise ConfigError(
                f"{slots} expert slots of {stride / 1e6:.1f} MB were requested; there is memory for "
                f"{(free + moe.executor.device_bytes) // stride}: request fewer, or free memory"
            )
        most = kv_cache.num_pages + (free - more_slots) // page_bytes - moved
        if grown > 0 and pages > most:
            raise ConfigError(
                f"--max-total-tokens was given {requested.max_total_tokens}; there is memory for "
                f"{most * requested.page_size} tokens: request fewer, or free memory"
            )
        return MemorySplit(
            slots, -1, pages, min(longest_request(requested, model), pages * requested.page_size)
        )

    return plan
