"""The machine at hand for a fit: memory, accelerator, threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.device.finding import choose_accelerator, cuda_indices
from twofold.experts.profiles import MachineProfile, load_machine_profile
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
    machine = Machine(
        available_memory_bytes(), choice.label, choice.reason, threads=threads, threads_reason=reason
    )
    if devices:
        facts = devices[0].native.facts()
        total, free = int(facts["total_bytes"]), int(facts["free_bytes"])
        return dataclasses.replace(machine, device_bytes=(total, free)), load_machine_profile(
            config.machine_profile
        )
    if choice.profile is None or "vram_gb" not in choice.profile.figures:
        return machine, None
    vram = int(choice.profile.figures["vram_gb"].value * 1e9)
    return dataclasses.replace(machine, device_bytes=(vram, vram)), choice.profile


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
    if plan.machine.device_bytes is not None:
        return device_speed(files, profile, plan.num_slots, context) if profile is not None else None
    pool = ops.ThreadPool(plan.config.cpu_threads, plan.config.numa)
    return measured_speed(files, pool, context, files.config.cache_dtype(plan.config.kv_cache_dtype))
