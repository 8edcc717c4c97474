"""The machine at hand for a fit: memory, accelerator, threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.device.finding import choose_accelerator, cuda_indices, device_memories
from twofold.device.memory.budget import DeviceMemory
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.profiles import MachineProfile, load_machine_profile, profile_of_devices
from twofold.fit.plan import FitPlan, Machine, plan_fit
from twofold.fit.speed import Speed, device_speed, measured_speed
from twofold.fit.threads import measured_threads
from twofold.models.model_files import ModelFiles
from twofold.weights.host_memory import available_memory_bytes

_SHOWN_CONTEXT = 4096


def this_machine(config: EngineConfig, *, measures_threads: bool) -> tuple[Machine, MachineProfile | None]:
    """The machine with the accelerator that `config` chooses, and the accelerator's profile if there is one."""
    choice, devices = choose_accelerator(config.accelerator, cuda_indices(config))
    threads, reason = config.cpu_threads, "one per physical core"
    if measures_threads and config.cpu_threads == 0:
        chosen = measured_threads()
        threads, reason = chosen.count, chosen.reason
    accelerator_reason = f"bad: {choice.reason}" if choice.unused_gpu else choice.reason
    machine = Machine(
        available_memory_bytes(), choice.label, accelerator_reason, threads=threads, threads_reason=reason
    )
    if devices:
        measured = load_machine_profile(config.machine_profile)
        profile = None if measured is None else profile_of_devices(measured, choice.devices)
        return dataclasses.replace(
            machine, memories=tuple(device_memories(devices)), devices=choice.device_names
        ), profile
    return emulated_machine(machine, choice)


def emulated_machine(machine: Machine, choice: AcceleratorChoice) -> tuple[Machine, MachineProfile | None]:
    """`machine` with the devices of an emulated accelerator, and its profile; unchanged if their memory is unknown."""
    figures = [] if choice.profile is None else [device.figures for device in choice.profile.devices]
    if not figures or not all("vram_gb" in each for each in figures):
        return machine, None
    sizes = [int(each["vram_gb"].value * 1e9) for each in figures]
    memories = tuple(DeviceMemory(size, size) for size in sizes)
    return dataclasses.replace(machine, memories=memories, devices=choice.device_names), choice.profile


def fit_here(
    config: EngineConfig, given: Collection[str], files: ModelFiles, *, predicts: bool = True
) -> FitPlan:
    """The fit of a model to this machine, with predicted speed."""
    machine, profile = this_machine(config, measures_threads="cpu_threads" not in given)
    plan = plan_fit(config, given, files, machine)
    if not predicts or not plan.fits:
        return plan
    return dataclasses.replace(plan, speed=_speed(plan, files, profile))


def _speed(plan: FitPlan, files: ModelFiles, profile: MachineProfile | None) -> Speed | None:
    context = min(_SHOWN_CONTEXT, plan.context)
    if plan.machine.memories:
        slots = plan.device_slots or (plan.num_slots,)
        return None if profile is None else device_speed(files, profile, slots, context)
    pool = ops.ThreadPool(plan.config.cpu_threads, plan.config.numa)
    return measured_speed(files, pool, context, files.config.cache_dtype(plan.config.kv_cache_dtype))
