"""How the memory of GPUs is split between dense weights, KV cache and expert slots, before anything is loaded.

Each GPU has the dense weights and the KV cache of its layers, which are contiguous (`pipeline` divides them); the first
one has the embedding and the head too.
Pure arithmetic on sizes; queries no device. Sizes the configuration sets are met exactly or refused, with the flag and
the largest value that fits. Sizes left open are filled: the KV cache up to a share, then expert slots with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.memory.needs import DeviceNeeds, DeviceShare
from twofold.experts.accelerator import slots_of_mib
from twofold.experts.device_split import split_slots
from twofold.models.config import CacheDType
from twofold.models.sizing import gib
from twofold.step.capacity import DRAFTED_SEQUENCES

WORKSPACE_BYTES: Final = 768 * 2**20
"""CUDA context, libraries and graphs: an estimate, not a measurement."""
_SAMPLED_ROWS: Final = 32
_KV_SHARE: Final = 0.25
_KV_CONTEXTS: Final = 8
_RECORD_SHARE: Final = 0.125
"""Share for records of the memory left beside the dense weights."""
_STAGING_SHARE: Final = 0.1


def device_cache_dtype(config: EngineConfig) -> CacheDType:
    """KV cache type on a device. ConfigError: --kv-cache-dtype asks for one that the device's kernels do not read."""
    if config.kv_cache_dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"--kv-cache-dtype was given {config.kv_cache_dtype!r}; on a device the KV cache is bfloat16: give auto or "
            "bfloat16, or keep the model on the CPU with --accelerator none"
        )
    return "bfloat16"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU, in bytes."""

    total_bytes: int
    free_bytes: int

    def usable_bytes(self, utilization: float) -> int:
        """The part that --gpu-memory-utilization allows and that is free."""
        return min(int(self.total_bytes * utilization), self.free_bytes)


@dataclass(frozen=True)
class GpuBudget:
    """The split of one GPU. All fields but `num_*` are in bytes."""

    limit_bytes: int
    """Usable part of its memory."""
    workspace_bytes: int
    dense_bytes: int
    """Dense weights of its layers."""
    kv_bytes: int
    record_bytes: int
    """All records of its layers, including the padding's."""
    expert_bytes: int
    """Slots and staging slots."""
    num_slots: int
    adapter_bytes: int = 0
    """Reserved for LoRA adapters."""
    picture_bytes: int = 0
    """Reserved for the picture encoder."""

    @property
    def used_bytes(self) -> int:
        kept = self.kv_bytes + self.record_bytes + self.expert_bytes
        return self.workspace_bytes + self.dense_bytes + self.adapter_bytes + self.picture_bytes + kept

    @property
    def reserved(self) -> list[str]:
        """What memory is reserved for, in words."""
        parts = {"LoRA adapters": self.adapter_bytes, "picture encoder": self.picture_bytes}
        return [f"{name} {gib(size)}" for name, size in parts.items() if size]


@dataclass(frozen=True)
class DeviceBudget:
    """The split of a machine's GPUs, the main one first."""

    gpus: tuple[GpuBudget, ...]
    slot_bytes: int
    """Size of one slot."""
    num_kv_tokens: int
    num_slots: int
    """Slots over all layers, of all GPUs."""
    num_staging: int
    """Each GPU's slots for fetched experts; 0 where every expert has a slot of its own."""
    num_experts: int
    """Experts over all layers."""
    num_records: int | None = None
    """Sequences that can run at once, where each needs a record; None: the model has no records."""
    num_draft_records: int = 0
    """Further records, for the state after each draft of a step."""
    shares: tuple[float, ...] = ()
    """Share of the slots of each GPU; empty: there is one."""
    homes: tuple[int, ...] = ()
    """The GPU of each decoder layer; empty: the main one."""

    def _records(self, gpu: GpuBudget) -> str:
        if self.num_records is None:
            return ""
        drafts = f" and {self.num_draft_records} of drafts" if self.num_draft_records else ""
        return f"{self.num_records} records of sequences{drafts} ({gib(gpu.record_bytes)}), "

    def explain(self) -> str:
        """The split in one line, for logs."""
        return "GPU memory: " + "; ".join(
            (f"GPU {number}: " if number > 1 else "")
            + f"{gib(gpu.used_bytes)} of {gib(gpu.limit_bytes)}: "
            + (f"{self.homes.count(number - 1)} layers, " if self.homes else "")
            + f"dense weights {gib(gpu.dense_bytes)}, "
            f"KV cache {gib(gpu.kv_bytes)} for {self.num_kv_tokens} tokens, {self._records(gpu)}{gpu.num_slots} of "
            f"{self.num_experts} experts ({gib(gpu.num_slots * self.slot_bytes)}), {self.num_staging} staging slots "
            f"({gib(self.num_staging * self.slot_bytes)}), "
            + "".join(f"{each}, " for each in gpu.reserved)
            + f"workspace {gib(gpu.workspace_bytes)}"
            for number, gpu in enumerate(self.gpus, 1)
        )


def _plan_records(
    config: EngineConfig, needs: DeviceNeeds, rooms: Sequence[int], shares: Sequence[DeviceShare]
) -> tuple[int | None, int]:
    """(number of sequences with a record, records of drafts). The padding has one more."""
    if needs.record_bytes == 0:
        return None, 0
    fitting, room = min(
        (int(max(room, 0) * _RECORD_SHARE) // share.record_bytes - 1, max(room, 0))
        for room, share in zip(rooms, shares, strict=True)
        if share.record_bytes
    )
    if fitting < 1:
        raise ConfigError(
            f"a sequence's record takes {gib(needs.record_bytes)}, beside the dense weights there is {gib(room)} on "
            "the GPU; raise --gpu-memory-utilization "
            f"(now {config.gpu_memory_utilization}) or use --accelerator none"
        )
    depth = 0 if config.speculative_config is None else config.speculation.num_speculative_tokens
    count = min(config.max_num_seqs, max(fitting - depth, 1))
    num_drafts = min(depth * min(count, DRAFTED_SEQUENCES), fitting - count)
    return count, num_drafts


def plan_devices(
    config: EngineConfig,
    needs: DeviceNeeds,
    memories: Sequence[DeviceMemory],
    shares: tuple[float, ...] = (),
    homes: tuple[int, ...] = (),
) -> DeviceBudget:
    """Split the memory of the machine's GPUs, the main one first.

    shares: of the slots, one for each GPU; empty: in proportion to the room left for them. homes: the GPU of each
    decoder layer; empty: the first one.

    Raises:
        ConfigError: it does not fit; one line that names the flag and the value to change it to.
    """
    limits = [memory.usable_bytes(config.gpu_memory_utilization) for memory in memories]
    parts = needs.shares(len(memories), homes)
    on_each = WORKSPACE_BYTES + config.max_num_batched_tokens * needs.activation_bytes_per_token
    workspaces = [on_each + _SAMPLED_ROWS * needs.sampled_row_bytes, *([on_each] * (len(memories) - 1))]
    pictures = [needs.picture_bytes(config, n) for n in range(len(memories))]
    reserved = [needs.adapter_bytes(config) + each for each in pictures]
    rooms = [
        limit - part.dense_bytes - workspace - kept
        for limit, part, workspace, kept in zip(limits, parts, workspaces, reserved, strict=True)
    ]
    num_records, num_draft_records = _plan_records(config, needs, rooms, parts)
    kept_records = 0 if num_records is None else num_records + num_draft_records + 1
    record_bytes = [kept_records * part.record_bytes for part in parts]
    rooms = [room - records for room, records in zip(rooms, record_bytes, strict=True)]
    _check_rooms(config, memories, rooms, parts=parts, workspaces=workspaces, reserved=reserved)
    tokens, kv_bytes = _kv_tokens(config, needs, rooms, parts)
    left = [max(room - kept, 0) for room, kept in zip(rooms, kv_bytes, strict=True)]
    num_slots, num_staging, shares = _slots(config, needs, left, shares)
    everything = needs.num_layers * needs.num_experts
    gpus = tuple(
        GpuBudget(
            limit_bytes=limits[n],
            workspace_bytes=workspaces[n],
            dense_bytes=parts[n].dense_bytes,
            kv_bytes=tokens * parts[n].kv_bytes_per_token,
            record_bytes=record_bytes[n],
            expert_bytes=(count + num_staging) * needs.slot_bytes,
            num_slots=count,
            adapter_bytes=needs.adapter_bytes(config),
            picture_bytes=pictures[n],
        )
        for n, count in enumerate(split_slots(num_slots, shares or (1.0,), everything))
    )
    return DeviceBudget(
        gpus=gpus,
        slot_bytes=needs.slot_bytes,
        num_kv_tokens=tokens,
        num_slots=num_slots,
        num_staging=num_staging,
        num_experts=everything,
        num_records=num_records,
        num_draft_records=num_draft_records,
        shares=shares if len(gpus) > 1 else (),
        homes=homes if any(homes) else (),
    )


def _check_rooms(
    config: EngineConfig,
    memories: Sequence[DeviceMemory],
    rooms: Sequence[int],
    *,
    parts: Sequence[DeviceShare],
    workspaces: Sequence[int],
    reserved: Sequence[int],
) -> None:
    """ConfigError: a GPU has no room for one page of its layers' KV cache."""
    for number, (room, part) in enumerate(zip(rooms, parts, strict=True)):
        usable = memories[number].usable_bytes(config.gpu_memory_utilization)
        if room < config.page_size * part.kv_bytes_per_token and (number == 0 or part.dense_bytes):
            further = (
                f", {gib(reserved[number])} for LoRA adapters (--max-loras) and pictures (--vision-device)"
                if reserved[number]
                else ""
            )
            raise ConfigError(
                f"the dense weights ({gib(part.dense_bytes)}){further} and a workspace of {gib(workspaces[number])} "
                f"leave no room for a KV cache in the {gib(usable)} that may be used of the GPU "
                f"({gib(memories[number].free_bytes)} are free); raise --gpu-memory-utilization (now "
                f"{config.gpu_memory_utilization}), end other programs on the GPU, or use --accelerator none"
            )


def plan_device(config: EngineConfig, needs: DeviceNeeds, total_bytes: int, free_bytes: int) -> DeviceBudget:
    """`plan_devices` for one GPU with `free_bytes` of `total_bytes` free."""
    return plan_devices(config, needs, [DeviceMemory(total_bytes, free_bytes)])


def _kv_tokens(
    config: EngineConfig, needs: DeviceNeeds, rooms: Sequence[int], parts: Sequence[DeviceShare]
) -> tuple[int, list[int]]:
    """Tokens of the KV cache, in whole pages, and the bytes reserved for it on each GPU (at least what it takes)."""
    page = config.page_size
    holders = [(room, part.kv_bytes_per_token) for room, part in zip(rooms, parts, strict=True)]
    affordable = min(room // each for room, each in holders if each) // page * page

    def reserve(tokens: float) -> list[int]:
        return [int(tokens * each) for _, each in holders]

    if config.max_total_tokens is not None:
        tokens = max(config.max_total_tokens // page, 1) * page
        if tokens > affordable:
            raise ConfigError(
                f"--max-total-tokens was given {config.max_total_tokens}; beside the dense weights the GPU has room "
                f"for {affordable} tokens; lower it to that or raise --gpu-memory-utilization "
                f"(now {config.gpu_memory_utilization})"
            )
        return tokens, reserve(tokens)
    context = min(config.max_model_len or needs.max_context, needs.max_context)
    wanted = _KV_CONTEXTS * -(-context // page) * page
    # Reserved before rounding to pages, so that more memory never means fewer slots.
    fitting = min(max(int(room * _KV_SHARE), page * each) / each for room, each in holders if each)
    reserved = min(float(wanted), fitting)
    requested, _ = _requested_slots(config, needs)
    if requested is not None:  # requested sizes come before defaults
        experts = requested + (needs.top_k if requested < needs.num_layers * needs.num_experts else 0)
        left = sum(max(room, 0) for room in rooms) - experts * needs.slot_bytes
        reserved = max(min(reserved, left / needs.kv_bytes_per_token), float(page))
    return int(reserved) // page * page, reserve(reserved)


def _slots(
    config: EngineConfig, needs: DeviceNeeds, rooms: Sequence[int], shares: tuple[float, ...]
) -> tuple[int, int, tuple[float, ...]]:
    """Expert slots of all GPUs, staging slots of each, and each GPU's share of the slots."""
    everything = needs.num_layers * needs.num_experts
    fitting = [room // needs.slot_bytes for room in rooms]
    fitting[0] -= len(rooms) - 1  # slots that do not divide go to the first GPU
    requested, flag = _requested_slots(config, needs)
    all_fit = _total(fitting, shares) >= everything
    if all_fit and requested is None:
        return everything, 0, _shares(fitting, shares)
    least = max(min(fitting), 0)
    staging = min(max(int(least * _STAGING_SHARE), needs.top_k), needs.num_experts)
    if requested is None:
        left = [max(count - staging, 0) for count in fitting]
        return min(_total(left, shares), everything), min(staging, least), _shares(left, shares)
    left = fitting if all_fit else [max(count - needs.top_k, 0) for count in fitting]
    most = min(_total(left, shares), everything)
    shares = _shares(left, shares)
    if requested > most:
        raise ConfigError(
            f"{flag} asks for {requested} expert slots of {needs.slot_bytes / 1e6:.1f} MB; the GPU has room for {most} "
            f"beside dense weights, KV cache and staging: lower it to {_largest(flag, most, needs)}, lower "
            f"--max-total-tokens, or raise --gpu-memory-utilization (now {config.gpu_memory_utilization})"
        )
    slots = split_slots(requested, shares, everything)
    unused = min(count - used for count, used in zip(fitting, slots, strict=True))
    return requested, 0 if requested == everything else min(unused, needs.num_experts), shares


def _total(slots: Sequence[int], shares: Sequence[float]) -> int:
    """Slots of all GPUs where each has at most `slots`, in these shares; in any if there are none."""
    if not shares:
        return sum(max(count, 0) for count in slots)
    return min(int(max(count, 0) / share) for count, share in zip(slots, shares, strict=True) if share > 0)


def _shares(slots: Sequence[int], shares: tuple[float, ...]) -> tuple[float, ...]:
    total = sum(slots)
    return shares or tuple(count / total if total > 0 else 1 / len(slots) for count in slots)


def _requested_slots(config: EngineConfig, needs: DeviceNeeds) -> tuple[int | None, str]:
    if config.num_gpu_experts is not None and config.gpu_experts_ratio is None:
        if config.num_gpu_experts > needs.num_experts:
            raise ConfigError(
                f"--num-gpu-experts was given {config.num_gpu_experts}; the model has {needs.num_experts} experts per "
                "layer"
            )
        return config.num_gpu_experts * needs.num_layers, f"--num-gpu-experts {config.num_gpu_experts}"
    if config.gpu_experts_ratio is not None:
        slots = round(config.gpu_experts_ratio * needs.num_layers * needs.num_experts)
        return slots, f"--gpu-experts-ratio {config.gpu_experts_ratio}"
    if config.moe_cache_mib is not None:
        slots = slots_of_mib(config.moe_cache_mib, needs.num_layers * needs.num_experts, needs.slot_bytes)
        return slots, f"--moe-cache-mib {config.moe_cache_mib}"
    return None, ""


def _largest(flag: str, most: int, needs: DeviceNeeds) -> str:
    if flag.startswith("--num-gpu-experts"):
        return str(most // needs.num_layers)
    if flag.startswith("--moe-cache-mib"):
        return str(most * needs.slot_bytes // 2**20)
    # Rounded down, so that the proposed value is accepted.
    return f"{int(most / (needs.num_layers * needs.num_experts) * 1000) / 1000:.3f}"
