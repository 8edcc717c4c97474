"""Loads a model with dense weights, KV cache and expert slots on GPUs and experts in host memory.

The devices' memory is split, and the split logged, before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from twofold.api.config import EngineConfig
from twofold.api.control import MemorySplit
from twofold.api.errors import CapacityError, ConfigError, KernelError
from twofold.blocks import ops
from twofold.device.adapters.loaded import DeviceAdapters
from twofold.device.device import Device
from twofold.device.finding import device_memories
from twofold.device.memory.budget import device_cache_dtype, plan_devices
from twofold.device.memory.pipeline import plan_machine
from twofold.device.model import DeviceModel, Stage
from twofold.device.runner import DeviceRunner
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.pins import check_pins, usable_slots
from twofold.models import ModelFiles, ProgressFn
from twofold.models.sizing import measure_files
from twofold.step.capacity import longest_request, plan_snapshots
from twofold.step.expert_loading import load_experts, slot_plan
from twofold.step.runner import LoadedRunner
from twofold.weights.host_memory import available_memory_bytes

_log = logging.getLogger(__name__)


def load_on_device(
    config: EngineConfig,
    files: ModelFiles,
    pool: ops.ThreadPool,
    choice: AcceleratorChoice,
    devices: Sequence[Device],
    progress: ProgressFn | None,
    expert_devices: tuple[str, ...] = (),
) -> LoadedRunner:
    """Plan the memory, then load. choice: that of `devices`, the main one first; expert_devices: as in
    `SlotPlan.devices`.

    Raises:
        ConfigError: the requested sizes do not fit; the message names the flag.
        ModelLoadError: the model cannot be used.
        CapacityError, KernelError: the device has less memory than it reported, or failed.
    """
    max_context = longest_request(config, files.config)
    device, memories = devices[0], device_memories(devices)
    size = measure_files(files, kv_cache_dtype=device_cache_dtype(config))
    needs, budget = plan_machine(config, size, choice.devices, memories)
    homes = tuple(budget.homes[layer] for layer in files.config.moe_layers) if budget.homes else ()
    check_pins(expert_devices, budget.num_slots, needs.num_layers, needs.num_experts)
    _log.info("%s", budget.explain())
    num_pages = budget.num_kv_tokens // config.page_size
    max_context = min(max_context, num_pages * config.page_size)
    record_bytes = sum(block.device_record_bytes for layer in files.config.layers for block in layer)
    num_snapshots = plan_snapshots(config, record_bytes, available_memory_bytes())
    try:
        others = [Stage(each.torch_device, each.kernels(max_context), each.active) for each in devices[1:]]
        model = DeviceModel(
            files,
            pool,
            device.torch_device,
            device.kernels(max_context),
            max_context,
            others=others,
            homes=budget.homes,
        )
        # Looking ahead costs launches in every layer, and no GPU has shown a gain yet: only on request.
        look_ahead = config.prefetch == "on"
        slots = replace(
            slot_plan(
                config, files, budget.num_slots, budget.num_staging, expert_devices, split=budget.shares
            ),
            prefetch=look_ahead,
            homes=homes,
        )
        moe = load_experts(files, pool, choice, config, slots, progress)
        adapters = None
        if config.loads_adapters:
            if files.config.routed.second_half:
                raise ConfigError(
                    "--lora-modules and --lora-dir were given for experts of two sizes, whose adapters a device cannot "
                    "compute; use --accelerator none"
                )
            reserved = needs.max_adapter_bytes(config)
            adapters = DeviceAdapters(
                files, model.matrices, moe.store, devices=devices, config=config, num_bytes=reserved
            )
        runner = DeviceRunner(
            model,
            moe,
            devices,
            num_pages=num_pages,
            page_size=config.page_size,
            max_context=max_context,
            num_records=budget.num_records or 0,
            num_snapshots=num_snapshots,
            num_draft_records=budget.num_draft_records,
            look_ahead=look_ahead,
            homes=homes,
            adapters=adapters,
        )
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device.torch_device} has less room than it said ({str(error).splitlines()[0]}); {budget.explain()}: "
            "lower --max-total-tokens, --gpu-experts-ratio or --gpu-memory-utilization"
        ) from error
    except RuntimeError as error:  # torch's type for any error of CUDA
        raise KernelError(f"{device.torch_device} failed: {str(error).splitlines()[0]}") from error

    def plan(requested: EngineConfig, _num_used: int) -> MemorySplit:
        found = plan_devices(requested, needs, memories, budget.shares, budget.homes)
        pages = found.num_kv_tokens // config.page_size
        # Rotations and graphs were made for the initial context length.
        check_pins(moe.plan.devices, found.num_slots, needs.num_layers, needs.num_experts)
        usable = usable_slots(moe.plan.devices, needs.num_layers, needs.num_experts)
        return MemorySplit(
            min(found.num_slots, usable), found.num_staging, pages, min(max_context, pages * config.page_size)
        )

    return LoadedRunner(
        runner=runner,
        num_pages=num_pages,
        max_context=max_context,
        memory=runner.memory,
        reason=budget.explain(),
        num_records=budget.num_records,
        num_snapshots=num_snapshots,
        plan=plan,
        draft_records=range(
            num_others := (budget.num_records or 0) + num_snapshots, num_others + budget.num_draft_records
        ),
        own_record_first=True,
        # Their results depend on when experts are resident, so a step of several tokens would change them.
        verifier=None if moe.plan.changes_outputs else runner,
        page_bytes=needs.kv_bytes_per_token * config.page_size,
        record_bytes=record_bytes,
        adapters=adapters,
    )
