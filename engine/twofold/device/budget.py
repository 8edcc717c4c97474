"""How a GPU's memory is split between dense weights, KV cache and expert slots, before anything is loaded.

Pure arithmetic on sizes; queries no device. Sizes the configuration sets are met exactly or refused, with the flag and
the largest value that fits. Sizes left open are filled: the KV cache up to a share, then expert slots with the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.experts.accelerator import slots_of_mib
from twofold.models.config import CacheDType
from twofold.models.sizing import ModelSize
from twofold.step.capacity import DRAFTED_SEQUENCES

WORKSPACE_BYTES: Final = 768 * 2**20
"""CUDA context, libraries and graphs: an estimate, not a measurement."""
_SAMPLED_ROWS: Final = 32
_KV_SHARE: Final = 0.25
_KV_CONTEXTS: Final = 8
_RECORD_SHARE: Final = 0.125
"""Share for records of the memory left beside the dense weights."""
_STAGING_SHARE: Final = 0.1


@dataclass(frozen=True)
class DeviceNeeds:
    """Memory that a model needs on the device."""

    dense_bytes: int
    kv_bytes_per_token: int
    one_expert_bytes: int
    """The largest expert's size."""
    num_layers: int
    """MoE layers."""
    num_experts: int
    """Experts per layer."""
    top_k: int
    max_context: int
    activation_bytes_per_token: int = 0
    """Peak activation memory of one layer in a prefill chunk, per token."""
    sampled_row_bytes: int = 0
    """Logits of one token plus the sampler's intermediates."""
    record_bytes: int = 0
    """Fixed-size state of one sequence over all layers (recurrent layers); 0: the model has none."""

    @property
    def slot_bytes(self) -> int:
        return _core.slot_stride(self.one_expert_bytes)


def needs_of(size: ModelSize) -> DeviceNeeds:
    """Device needs from `measure_model`'s result, with the device's KV cache type."""
    model = size.config
    # Per pair: outputs and gate and up products in f32, input of down in bf16. Per token: residual stream, its norm,
    # queries, keys and values, router scores.
    pair_bytes = 4 * model.hidden_size + 10 * model.routed.intermediate_size
    elements = max(block.device_elements_per_token for layer in model.layers for block in layer)
    page_elements = sum(block.device_page_elements for layer in model.layers for block in layer)
    return DeviceNeeds(
        dense_bytes=size.device_dense_bytes,
        kv_bytes_per_token=2 * page_elements,
        one_expert_bytes=max(1, size.one_expert_bytes),  # 0 in a model without experts
        num_layers=len(size.config.moe_layers),
        num_experts=size.config.num_experts,
        top_k=size.config.top_k,
        max_context=size.config.max_context,
        activation_bytes_per_token=model.top_k * pair_bytes + 10 * model.hidden_size + 8 * elements,
        sampled_row_bytes=40 * model.vocab_size,
        record_bytes=sum(block.device_record_bytes for layer in model.layers for block in layer),
    )


def device_cache_dtype(config: EngineConfig) -> CacheDType:
    """KV cache type on a device. ConfigError: --kv-cache-dtype asks for one that the device's kernels do not read."""
    if config.kv_cache_dtype not in ("auto", "bfloat16"):
        raise ConfigError(
            f"--kv-cache-dtype was given {config.kv_cache_dtype!r}; on a device the KV cache is bfloat16: give auto or "
            "bfloat16, or keep the model on the CPU with --accelerator none"
        )
    return "bfloat16"


@dataclass(frozen=True)
class DeviceBudget:
    """The split. All fields but `num_*` are in bytes."""

    limit_bytes: int
    """Usable part of the device's memory."""
    dense_bytes: int
    workspace_bytes: int
    kv_bytes: int
    slot_bytes: int
    """Size of one slot."""
    num_kv_tokens: int
    num_slots: int
    """Slots over all layers."""
    num_staging: int
    """Slots for fetched experts; 0 where every expert has a slot of its own."""
    num_experts: int
    """Experts over all layers."""
    num_records: int | None = None
    """Sequences that can run at once, where each needs a record; None: the model has no records."""
    num_draft_records: int = 0
    """Further records, for the state after each draft of a step."""
    record_bytes: int = 0
    """All records, including the padding's."""

    @property
    def used_bytes(self) -> int:
        experts = (self.num_slots + self.num_staging) * self.slot_bytes
        return self.dense_bytes + self.workspace_bytes + self.kv_bytes + self.record_bytes + experts

    def _records(self) -> str:
        if self.num_records is None:
            return ""
        drafts = f" and {self.num_draft_records} of drafts" if self.num_draft_records else ""
        return f"{self.num_records} records of sequences{drafts} ({_gib(self.record_bytes)}), "

    def explain(self) -> str:
        """The split in one line, for logs."""
        return (
            f"GPU memory: {_gib(self.used_bytes)} of {_gib(self.limit_bytes)}: dense weights {_gib(self.dense_bytes)}, "
            f"KV cache {_gib(self.kv_bytes)} for {self.num_kv_tokens} tokens, {self._records()}{self.num_slots} of "
            f"{self.num_experts} "
            f"experts ({_gib(self.num_slots * self.slot_bytes)}), {self.num_staging} staging slots "
            f"({_gib(self.num_staging * self.slot_bytes)}), workspace {_gib(self.workspace_bytes)}"
        )


def _plan_records(config: EngineConfig, needs: DeviceNeeds, room: int) -> tuple[int | None, int, int]:
    """(number of sequences with a record, records of drafts, bytes of all these plus the padding's)."""
    if needs.record_bytes == 0:
        return None, 0, 0
    fitting = int(room * _RECORD_SHARE) // needs.record_bytes - 1
    if fitting < 1:
        raise ConfigError(
            f"a sequence's record takes {_gib(needs.record_bytes)}, beside the dense weights there is {_gib(room)} on "
            "the GPU; raise --gpu-memory-utilization "
            f"(now {config.gpu_memory_utilization}) or use --accelerator none"
        )
    depth = 0 if config.speculative_config is None else config.speculation.num_speculative_tokens
    count = min(config.max_num_seqs, max(fitting - depth, 1))
    num_drafts = min(depth * min(count, DRAFTED_SEQUENCES), fitting - count)
    return count, num_drafts, (count + num_drafts + 1) * needs.record_bytes


def plan_device(config: EngineConfig, needs: DeviceNeeds, total_bytes: int, free_bytes: int) -> DeviceBudget:
    """Split the memory of a device with `free_bytes` of `total_bytes` free.

    Raises:
        ConfigError: it does not fit; one line that names the flag and the value to change it to.
    """
    limit = min(int(total_bytes * config.gpu_memory_utilization), free_bytes)
    workspace = WORKSPACE_BYTES + config.max_num_batched_tokens * needs.activation_bytes_per_token
    workspace += _SAMPLED_ROWS * needs.sampled_row_bytes
    room = limit - needs.dense_bytes - workspace
    num_records, num_draft_records, record_bytes = _plan_records(config, needs, max(room, 0))
    room -= record_bytes
    least_kv = config.page_size * needs.kv_bytes_per_token
    if room < least_kv:
        raise ConfigError(
            f"the dense weights ({_gib(needs.dense_bytes)}) and a workspace of {_gib(workspace)} leave no room "
            f"for a KV cache in the {_gib(limit)} that may be used of the GPU ({_gib(free_bytes)} are free); raise "
            f"--gpu-memory-utilization (now {config.gpu_memory_utilization}), end other programs on the GPU, or use "
            "--accelerator none"
        )
    tokens, reserved = _kv_tokens(config, needs, room)
    kv_bytes = tokens * needs.kv_bytes_per_token
    num_slots, num_staging = _slots(config, needs, room - reserved)
    return DeviceBudget(
        limit_bytes=limit,
        dense_bytes=needs.dense_bytes,
        workspace_bytes=workspace,
        kv_bytes=kv_bytes,
        slot_bytes=needs.slot_bytes,
        num_kv_tokens=tokens,
        num_slots=num_slots,
        num_staging=num_staging,
        num_experts=needs.num_layers * needs.num_experts,
        num_records=num_records,
        num_draft_records=num_draft_records,
        record_bytes=record_bytes,
    )


def _kv_tokens(config: EngineConfig, needs: DeviceNeeds, room: int) -> tuple[int, int]:
    """Tokens of the KV cache, in whole pages, and the bytes reserved for it (at least what it takes)."""
    page = config.page_size
    affordable = room // needs.kv_bytes_per_token // page * page
    if config.max_total_tokens is not None:
        tokens = max(config.max_total_tokens // page, 1) * page
        if tokens > affordable:
            raise ConfigError(
                f"--max-total-tokens was given {config.max_total_tokens}; beside the dense weights the GPU has room "
                f"for {affordable} tokens; lower it to that or raise --gpu-memory-utilization "
                f"(now {config.gpu_memory_utilization})"
            )
        return tokens, tokens * needs.kv_bytes_per_token
    context = min(config.max_model_len or needs.max_context, needs.max_context)
    wanted = _KV_CONTEXTS * -(-context // page) * page
    # Reserved before rounding to pages, so that more memory never means fewer slots.
    least = page * needs.kv_bytes_per_token
    reserved = min(wanted * needs.kv_bytes_per_token, max(int(room * _KV_SHARE), least))
    asked, _ = _asked_slots(config, needs)
    if asked is not None:  # requested sizes come before defaults
        experts = asked + (needs.top_k if asked < needs.num_layers * needs.num_experts else 0)
        reserved = max(min(reserved, room - experts * needs.slot_bytes), least)
    return reserved // needs.kv_bytes_per_token // page * page, reserved


def _slots(config: EngineConfig, needs: DeviceNeeds, room: int) -> tuple[int, int]:
    """Expert slots and staging slots."""
    everything = needs.num_layers * needs.num_experts
    fitting = room // needs.slot_bytes
    asked, flag = _asked_slots(config, needs)
    if fitting >= everything and asked is None:
        return everything, 0
    staging = min(max(int(fitting * _STAGING_SHARE), needs.top_k), needs.num_experts)
    if asked is None:
        return max(fitting - staging, 0), min(staging, fitting)
    most = everything if fitting >= everything else max(fitting - needs.top_k, 0)
    if asked > most:
        raise ConfigError(
            f"{flag} asks for {asked} expert slots of {needs.slot_bytes / 1e6:.1f} MB; the GPU has room for {most} "
            f"beside dense weights, KV cache and staging: lower it to {_largest(flag, most, needs)}, lower "
            f"--max-total-tokens, or raise --gpu-memory-utilization (now {config.gpu_memory_utilization})"
        )
    return asked, 0 if asked == everything else min(fitting - asked, needs.num_experts)


def _asked_slots(config: EngineConfig, needs: DeviceNeeds) -> tuple[int | None, str]:
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
