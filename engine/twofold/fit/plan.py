"""Chooses the settings that were left open, from sizes and a machine; given settings are kept.

Pure arithmetic on headers and sizes: neither weights nor devices are read. `speed` predicts what the choice reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.placement_config import SLOT_FIELDS
from twofold.api.settings import flag_name
from twofold.device.memory.budget import DeviceBudget, DeviceMemory, plan_devices
from twofold.device.memory.needs import needs_of
from twofold.device.memory.pipeline import plan_machine
from twofold.experts.device_split import requested_split, split_slots
from twofold.fit.speed import Speed
from twofold.models import picture_encoder
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import ModelSize, describe_tables, gib, measure_files

USUAL_CONTEXT: Final = 32_768
"""A context that a shorter one is not chosen below if a smaller KV cache type or fewer slots reach it."""
_LEAST_CONTEXT: Final = 512
_CONTEXTS: Final = 8
_SMALLER_FORMATS: Final = ("q8_0", "q6_k", "q4_k")


@dataclass(frozen=True)
class Machine:
    """The part of a machine that the fit depends on."""

    host_bytes: int
    """Memory available to the process."""
    accelerator: str
    """Label of the accelerator: none, cuda, or emulated:PROFILE."""
    accelerator_reason: str
    memories: tuple[DeviceMemory, ...] = ()
    """Memory of each device, the main one first; empty: there is none."""
    devices: tuple[str, ...] = ()
    """Names of the devices if there are several."""
    threads: int = 0
    threads_reason: str = "one per physical core"


@dataclass(frozen=True)
class Choice:
    """One setting as it will be used."""

    flag: str
    value: str
    why: str


@dataclass(frozen=True)
class FitPlan:
    """The completed configuration, and why."""

    config: EngineConfig
    choices: tuple[Choice, ...]
    size: ModelSize
    machine: Machine
    problem: str = ""
    """Why the model does not fit; empty if it fits."""
    remedies: tuple[str, ...] = ()
    """What would fit, one line each."""
    num_slots: int = 0
    device_slots: tuple[int, ...] = ()
    """Slots of each device if there are several."""
    context: int = 0
    """Longest prompt plus answer in tokens."""
    speed: Speed | None = None

    @property
    def fits(self) -> bool:
        return not self.problem

    def lines(self) -> Iterator[str]:
        """The table."""
        width = max(len(choice.value) for choice in self.choices)
        flags = max(len(choice.flag) for choice in self.choices)
        yield "fit: " + (self.problem or "settings of this run; a flag changes its line")
        for choice in self.choices:
            yield f"  {choice.flag:<{flags}}  {choice.value:<{width}}  {choice.why}"
        if self.speed is not None:
            yield (
                f"  predicted: {self.speed.decode:.1f} tokens/s decode at context {self.speed.context}, "
                f"{self.speed.prefill:.0f} tokens/s prefill ({self.speed.source})"
            )
        for remedy in self.remedies:
            yield f"  would fit: {remedy}"

    def lower(self) -> Iterator[str]:
        """What to lower after memory ran out although the plan fitted: other programs took it meanwhile."""
        half = max(1, self.context // 2)
        saved = self.size.kv_bytes_per_token * (self.config.max_total_tokens or half) / 2
        yield f"  would fit: --max-model-len {half} --max-total-tokens {half}, which saves {gib(saved)} or more"
        if self.config.kv_cache_dtype != "q8" and not self.machine.memories:
            yield "  would fit: --kv-cache-dtype q8, which halves the KV cache"
        if self.num_slots:
            ratio = 0.5 * self.num_slots / max(1, self.size.num_experts_total)
            yield f"  would fit: --gpu-experts-ratio {ratio:.3f}, half the slots"


def plan_fit(config: EngineConfig, given: Collection[str], files: ModelFiles, machine: Machine) -> FitPlan:
    """Fit `config` to a machine; settings in `given` are kept.

    A model that does not fit gives a plan with a `problem`.

    Raises:
        ConfigError: a given number of slots or of KV cache tokens cannot be met.
    """
    draft = _Draft(config, given, files, machine)
    return draft.on_device() if machine.memories else draft.on_host()


class _Draft:
    """One fit in the making."""

    def __init__(
        self, config: EngineConfig, given: Collection[str], files: ModelFiles, machine: Machine
    ) -> None:
        self.config, self.given, self.machine = config, frozenset(given), machine
        self.files = files = files.caching_rows(config.row_cache_bytes)
        self.longest = min(config.max_model_len or files.config.max_context, files.config.max_context)
        self.target = self.longest if "max_model_len" in given else min(self.longest, USUAL_CONTEXT)
        self.is_emulated = machine.accelerator.startswith("emulated")
        self.device_slots: tuple[int, ...] = ()
        self.changes: dict[str, Any] = {}
        self.why: dict[str, str] = {}

    def set(self, name: str, value: Any, why: str) -> None:
        """Set a field, unless it was given."""
        if name in self.given:
            self.why[name] = "given"
        else:
            self.changes[name] = value
            self.why[name] = why

    def on_host(self) -> FitPlan:
        """All weights in host memory and on the CPU."""
        size, tokens = self._kv_cache(extra_bytes=0)
        return self._host_plan(size, tokens, num_slots=0)

    def on_device(self) -> FitPlan:
        """Dense weights and slots on devices; all experts in host memory."""
        on_device = measure_files(self.files, kv_cache_dtype="bfloat16")
        budget, problem = self._device_budget(on_device)
        if budget is None and self.given & {*SLOT_FIELDS, "max_total_tokens"}:
            raise ConfigError(problem)  # names the flag and what it takes
        if budget is None:
            return self._unfit(on_device, f"the accelerator is too small: {problem}", ["--accelerator none"])
        slots = budget.num_slots
        if self.is_emulated:  # its slots are in host memory, too
            room = self.machine.host_bytes - on_device.host_bytes(budget.num_kv_tokens)
            fitting = max(0, room // _core.slot_stride(max(1, on_device.one_expert_bytes)))
            slots = min(slots, fitting)
            size, tokens = self._kv_cache(extra_bytes=slots * budget.slot_bytes)
            self._set_slots(slots, budget, on_device)
            return self._host_plan(size, tokens, slots)
        tokens = budget.num_kv_tokens
        self.set("kv_cache_dtype", "auto", "bfloat16, the type that the GPU's kernels read")
        self.set(
            "max_total_tokens",
            tokens,
            f"{gib(tokens * on_device.kv_bytes_per_token)} of VRAM for the KV cache",
        )
        self._set_slots(slots, budget, on_device)
        if on_device.host_bytes(0) > self.machine.host_bytes:
            return self._unfit(on_device, self._too_large(on_device), [])
        return self._done(on_device, min(self.longest, budget.num_kv_tokens), slots)

    def _device_budget(self, size: ModelSize) -> tuple[DeviceBudget | None, str]:
        """The split of the devices' memory for the longest context, up to the usual one, that it can hold."""
        machine, page, problem = self.machine, self.config.page_size, ""
        shares = requested_split(self.config.tensor_split, machine.devices) if machine.devices else ()

        def split(tokens: int) -> DeviceBudget:
            requested = self.config
            if "max_total_tokens" not in self.given:
                requested = dataclasses.replace(requested, max_total_tokens=max(tokens, page))
            if self.is_emulated:  # its first device has all dense layers
                return plan_devices(requested, needs_of(size), machine.memories, shares)
            return plan_machine(requested, size, machine.devices, machine.memories)[1]

        with contextlib.suppress(ConfigError):
            budget = split(self.longest)
            if budget.num_slots == budget.num_experts:  # all experts and the longest context
                return budget, ""
        tokens = self.target
        while tokens >= min(_LEAST_CONTEXT, self.target):
            try:
                return split(tokens), ""
            except ConfigError as error:
                problem = str(error)
            tokens //= 2
        return None, problem

    def _set_slots(self, slots: int, budget: DeviceBudget, size: ModelSize) -> None:
        given = next((name for name in SLOT_FIELDS if name in self.given), None)
        ratio = int(1000 * slots / budget.num_experts) / 1000 if budget.num_experts else 1.0
        name = given or "gpu_experts_ratio"
        beside = " and ".join(["the KV cache", *budget.gpus[0].reserved])
        self.set(name, ratio, f"{slots} of {budget.num_experts} experts: what VRAM holds beside {beside}")
        if self.machine.devices:
            self.device_slots = tuple(split_slots(slots, budget.shares, budget.num_experts))
        if not sum(self.device_slots):
            return
        self.set("tensor_split", ",".join(map(str, self.device_slots)), "")
        if not self.is_emulated:  # layers as they will be divided with these slots
            config = dataclasses.replace(self.config, **self.changes)
            budget = plan_machine(config, size, self.machine.devices, self.machine.memories)[1]
        if "tensor_split" not in self.given:
            self.why["tensor_split"] = "; ".join(self._device_shares(budget))

    def _device_shares(self, budget: DeviceBudget) -> Iterator[str]:
        """Contents of each of several devices."""
        homes = budget.homes or (0,) * len(self.files.config.layers)
        for number, (name, count) in enumerate(zip(self.machine.devices, self.device_slots, strict=True)):
            layers = f"dense weights of {homes.count(number)} layers, " if number in homes else ""
            yield f"{name}: {layers}{count} experts ({gib(count * budget.slot_bytes)})"

    def _kv_cache(self, extra_bytes: int) -> tuple[ModelSize, int]:
        """KV cache type and the tokens of one request that fit: the model's type, or q8 for a longer context."""
        kinds: tuple[str, ...] = ("auto", "q8")
        if "kv_cache_dtype" in self.given:
            kinds = (self.config.kv_cache_dtype,)
        best: tuple[ModelSize, int] | None = None
        for kind in kinds:
            size = measure_files(self.files, kv_cache_dtype=kind)
            room = self.machine.host_bytes - size.host_bytes(0) - size.bytes_per_sequence - extra_bytes
            room -= picture_encoder.encoder_bytes(size.encoder_elements, self.config, None)
            tokens = max(0, room // max(1, size.kv_bytes_per_token))
            if best is None or min(tokens, self.target) > min(best[1], self.target):
                best = size, tokens
                why = (
                    "the model's own precision" if kind == "auto" else "holds the context in half the memory"
                )
                self.set("kv_cache_dtype", kind, why)
            if tokens >= self.target:
                break
        assert best is not None
        return best

    def _host_plan(self, size: ModelSize, room_tokens: int, num_slots: int) -> FitPlan:
        page = self.config.page_size
        if room_tokens < min(_LEAST_CONTEXT, self.target):
            return self._unfit(size, self._too_large(size), list(self._smaller(size)))
        context = min(self.longest, room_tokens)
        if context < self.longest:
            self.set(
                "max_model_len", context // page * page, "what memory holds; the model's limit is longer"
            )
        else:
            self.set("max_model_len", None, "the model's own limit")
        if "max_total_tokens" in self.given and (self.config.max_total_tokens or 0) > room_tokens:
            problem = f"--max-total-tokens {self.config.max_total_tokens} needs more memory than there is"
            return self._unfit(size, problem, [f"--max-total-tokens {room_tokens // page * page}"])
        tokens = max(context, min(_CONTEXTS * self.longest, room_tokens // 4))
        count = f"{tokens / context:.1f}".removesuffix(".0")
        requests = "1 request" if count == "1" else f"{count} requests"
        why = f"{gib(tokens * size.kv_bytes_per_token)}, for {requests} of full length"
        self.set("max_total_tokens", max(page, tokens // page * page), why)
        return self._done(size, context, num_slots)

    def _too_large(self, size: ModelSize) -> str:
        return (
            f"does not fit: weights and working memory take {gib(size.host_bytes(0))}, "
            f"{gib(self.machine.host_bytes)} of memory are available"
        )

    def _smaller(self, size: ModelSize) -> Iterator[str]:
        """Formats in which the model would fit."""
        routed, layers = size.config.routed, len(size.config.moe_layers)
        for name in _SMALLER_FORMATS:
            try:
                of_layer = routed.bytes_by_expert((name,) * 3)
            except ValueError:
                continue
            needed = size.host_bytes(USUAL_CONTEXT) - size.expert_bytes + sum(of_layer) * layers
            if max(of_layer) < size.one_expert_bytes and needed <= self.machine.host_bytes:
                yield f"experts in {name} by twofold quantize or as GGUF: {gib(needed)} at context {USUAL_CONTEXT}"
        yield f"a machine with {gib(size.host_bytes(USUAL_CONTEXT))} of free memory, for context {USUAL_CONTEXT}"

    def _unfit(self, size: ModelSize, problem: str, remedies: list[str]) -> FitPlan:
        return dataclasses.replace(self._done(size, 0, 0), problem=problem, remedies=tuple(remedies))

    def _done(self, size: ModelSize, context: int, num_slots: int) -> FitPlan:
        single = "max_num_seqs" in self.given and self.config.max_num_seqs == 1
        self.set(
            "backend",
            "single" if single else self.config.backend,
            "one request at a time was given" if single else "serves several requests; single for one user",
        )
        self.set("cpu_threads", self.machine.threads, self.machine.threads_reason)
        if size.encoder_elements and self.config.takes_pictures:
            on_host = gib(picture_encoder.host_bytes(size.encoder_elements))
            on_device = gib(picture_encoder.device_bytes(size.encoder_elements))
            self.why["vision_device"] = (
                f"the picture encoder takes {on_host} of memory from the first picture on; on a GPU {on_device} of its "
                "memory are reserved"
            )
        if tables := describe_tables(size):
            self.why["row_cache_bytes"] = tables
        self._set_accelerator()
        config = dataclasses.replace(self.config, **self.changes)
        order = ("accelerator", "gpu_experts_ratio", *SLOT_FIELDS[1:], "tensor_split", "max_model_len")
        rest = (
            "max_total_tokens",
            "kv_cache_dtype",
            "cpu_threads",
            "backend",
            "vision_device",
            "row_cache_bytes",
        )
        names = [name for name in (*order, *rest) if name in self.why]
        shown = {"max_model_len": context or self.longest}
        choices = [
            Choice(flag_name(name), str(shown.get(name, getattr(config, name))), self.why[name])
            for name in names
        ]
        return FitPlan(
            config,
            tuple(choices),
            size,
            self.machine,
            num_slots=num_slots,
            device_slots=self.device_slots,
            context=context,
        )

    def _set_accelerator(self) -> None:
        """Show it as it was asked for, and what an automatic choice found."""
        asked, found = self.config.accelerator, self.machine.accelerator
        reason = self.machine.accelerator_reason
        explained = reason if asked == found or reason.startswith("bad: ") else f"{found}: {reason}"
        self.set("accelerator", asked, explained)
        if "accelerator" in self.given and asked != found:
            self.why["accelerator"] = f"given; {explained}"
