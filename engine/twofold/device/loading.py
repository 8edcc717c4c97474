"""Loads a model whose dense weights, KV cache and expert slots live on a GPU, and whose experts live in host memory.

The device's memory is split, and the split told, before anything is read. Which device: `DEVICE`; there is one so far.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from twofold.api.config import EngineConfig
from twofold.api.errors import CapacityError, KernelError
from twofold.blocks import ops
from twofold.blocks.device_step import DeviceKernels
from twofold.device.budget import DeviceBudget, needs_of, plan_device
from twofold.device.kernels import CudaKernels, TorchKernels
from twofold.device.model import DeviceModel
from twofold.device.runner import DeviceRunner
from twofold.engine.capacity import longest_request
from twofold.engine.expert_loading import load_experts, slot_plan
from twofold.engine.runner import LoadedRunner
from twofold.experts.accelerator import AcceleratorChoice, find_cuda
from twofold.models import ModelFiles, ProgressFn
from twofold.models.sizing import measure_files

DEVICE: Final = 0
_log = logging.getLogger(__name__)


def load_on_device(
    config: EngineConfig,
    files: ModelFiles,
    team: ops.ThreadTeam,
    choice: AcceleratorChoice,
    progress: ProgressFn | None,
) -> LoadedRunner:
    """Plan the memory, then load for it.

    Raises:
        ConfigError: what was asked for does not fit; the message names the flag.
        ModelLoadError: the model cannot be used.
        CapacityError, KernelError: the device has less room than it said, or failed.
    """
    module, why = find_cuda()
    if module is None:
        raise KernelError(f"the device was there when it was chosen: {why}")
    max_context = longest_request(config, files.config)
    budget = plan_on(module, config, files)
    _log.info("%s", budget.explain())
    device = torch.device("cpu") if module.host_addressable else torch.device("cuda", DEVICE)
    # A played device's memory is the host's: plain torch computes there.
    kernels: DeviceKernels = TorchKernels() if module.host_addressable else CudaKernels(max_context)
    num_pages = budget.num_kv_tokens // config.page_size
    max_context = min(max_context, num_pages * config.page_size)
    try:
        model = DeviceModel(files, team, device, kernels, max_context)
        slots = slot_plan(config, budget.num_slots, budget.num_staging)
        moe = load_experts(files, team, choice, config, slots, progress)
        runner = DeviceRunner(
            model, moe, module, num_pages=num_pages, page_size=config.page_size, max_context=max_context
        )
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has less room than it said ({str(error).splitlines()[0]}); {budget.explain()}: lower "
            "--max-total-tokens, --gpu-experts-ratio or --gpu-memory-utilization"
        ) from error
    return LoadedRunner(runner, num_pages, max_context, budget.explain())


def plan_on(module: Any, config: EngineConfig, files: ModelFiles) -> DeviceBudget:
    """The split of the module's device for these files. Raises ConfigError as `plan_device`, KernelError."""
    facts = module.open_device(DEVICE).facts()
    needs = needs_of(measure_files(files, kv_dtype_bytes=2))
    return plan_device(config, needs, facts["total_bytes"], facts["free_bytes"])
