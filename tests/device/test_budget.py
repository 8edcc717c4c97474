"""The split of a GPU's memory: within the limit, monotone, and one line that says what to change where it cannot be."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.memory.budget import (
    WORKSPACE_BYTES,
    DeviceBudget,
    DeviceMemory,
    device_cache_dtype,
    plan_device,
    plan_devices,
)
from twofold.device.memory.needs import DeviceNeeds

GIB = 2**30

needs_of_any_model = st.builds(
    DeviceNeeds,
    dense_bytes=st.integers(10**6, 20 * GIB),
    kv_bytes_per_token=st.integers(512, 512 * 1024),
    one_expert_bytes=st.integers(1000, 200 * 10**6),
    num_layers=st.integers(1, 64),
    num_experts=st.integers(2, 256),
    top_k=st.integers(1, 2),
    max_context=st.integers(16, 131072),
)
configs = st.builds(
    EngineConfig,
    gpu_memory_utilization=st.floats(0.05, 1.0),
    gpu_experts_ratio=st.none() | st.floats(0.0, 1.0),
    max_total_tokens=st.none() | st.integers(1, 10**6),
    page_size=st.sampled_from([1, 16, 256]),
)
devices = st.integers(GIB, 200 * GIB).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))

QWEN = DeviceNeeds(
    dense_bytes=3 * GIB,
    kv_bytes_per_token=98304,
    one_expert_bytes=9_437_184,
    num_layers=48,
    num_experts=128,
    top_k=8,
    max_context=40960,
)


FLAGS = r"--(gpu-memory-utilization|num-gpu-experts|gpu-experts-ratio|max-total-tokens)"


def refusal_or_plan(config: EngineConfig, needs: DeviceNeeds, device: tuple[int, int]) -> str | DeviceBudget:
    try:
        return plan_device(config, needs, *device)
    except ConfigError as error:
        return str(error)


def plan(config: EngineConfig, needs: DeviceNeeds, total: int, free: int) -> DeviceBudget | None:
    answer = refusal_or_plan(config, needs, (total, free))
    if isinstance(answer, DeviceBudget):
        return answer
    assert "\n" not in answer
    assert re.search(FLAGS, answer)
    return None


@given(configs, needs_of_any_model, devices)
def test_a_plan_never_takes_more_than_it_may(
    config: EngineConfig, needs: DeviceNeeds, device: tuple[int, int]
) -> None:
    budget = plan(config, needs, *device)
    if budget is None:
        return
    (gpu,) = budget.gpus
    assert gpu.used_bytes <= gpu.limit_bytes <= min(device[1], device[0] * config.gpu_memory_utilization)
    assert budget.num_kv_tokens >= config.page_size
    assert budget.num_kv_tokens % config.page_size == 0
    everything = needs.num_layers * needs.num_experts
    assert 0 <= budget.num_slots <= everything
    assert (
        budget.num_staging == 0 if budget.num_slots == everything else budget.num_staging <= needs.num_experts
    )
    if config.gpu_experts_ratio is not None:
        assert budget.num_slots == round(config.gpu_experts_ratio * everything)


@given(configs, needs_of_any_model, devices, st.integers(0, 50 * GIB))
def test_more_memory_never_gives_less(
    config: EngineConfig, needs: DeviceNeeds, device: tuple[int, int], more: int
) -> None:
    total, free = device
    less_memory = plan(config, needs, total, free)
    if less_memory is None:
        return
    more_memory = plan(config, needs, total + more, free + more)
    assert more_memory is not None
    assert more_memory.num_slots >= less_memory.num_slots
    assert more_memory.num_kv_tokens >= less_memory.num_kv_tokens


@given(needs_of_any_model, devices, st.floats(0.0, 1.0))
def test_the_proposed_ratio_is_accepted(needs: DeviceNeeds, device: tuple[int, int], ratio: float) -> None:
    refusal = refusal_or_plan(EngineConfig(gpu_experts_ratio=ratio), needs, device)
    proposed = re.search(r"lower it to ([0-9.]+),", refusal) if isinstance(refusal, str) else None
    if proposed is not None:
        plan_device(EngineConfig(gpu_experts_ratio=float(proposed[1])), needs, *device)


def test_missing_fields_are_filled() -> None:
    budget = plan_device(EngineConfig(), QWEN, 24 * GIB, 23 * GIB)
    (gpu,) = budget.gpus
    assert gpu.limit_bytes == int(24 * GIB * 0.9)
    assert gpu.limit_bytes - gpu.used_bytes < 2 * budget.slot_bytes + 16 * QWEN.kv_bytes_per_token
    assert budget.num_kv_tokens > 0
    assert budget.num_staging == 128
    everything = plan_device(EngineConfig(max_total_tokens=8192), QWEN, 140 * GIB, 139 * GIB)
    assert (everything.num_slots, everything.num_staging) == (48 * 128, 0)


def test_the_split_is_reported_in_one_line() -> None:
    text = plan_device(EngineConfig(gpu_experts_ratio=0.25), QWEN, 24 * GIB, 23 * GIB).explain()
    assert "\n" not in text
    assert "1536 of 6144 experts (13.50 GiB)" in text
    assert "dense weights 3.00 GiB" in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpu_experts_ratio": 0.9}, "--gpu-experts-ratio 0.9 asks for 5530 expert slots"),
        ({"num_gpu_experts": 100}, "--num-gpu-experts 100 asks for 4800 expert slots"),
        ({"num_gpu_experts": 129}, "the model has 128 experts per layer"),
        ({"max_total_tokens": 10**6}, "--max-total-tokens was given 1000000"),
        ({"gpu_memory_utilization": 0.1}, "raise --gpu-memory-utilization (now 0.1)"),
    ],
)
def test_what_cannot_be_names_its_flag(changes: dict[str, float], named: str) -> None:
    config = dataclasses.replace(EngineConfig(), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(named)):
        plan_device(config, QWEN, 24 * GIB, 23 * GIB)


def test_the_workspace_is_part_of_the_plan() -> None:
    (gpu,) = plan_device(EngineConfig(), QWEN, 24 * GIB, 23 * GIB).gpus
    assert gpu.workspace_bytes == WORKSPACE_BYTES


def test_adapters_get_memory_before_expert_slots() -> None:
    needs = dataclasses.replace(QWEN, adapter_elements=400_000)
    plain = plan_device(EngineConfig(max_total_tokens=8192), needs, 24 * GIB, 23 * GIB)
    config = EngineConfig(max_total_tokens=8192, lora_dir="adapters", max_loras=4, max_lora_rank=32)
    (gpu,) = (budget := plan_device(config, needs, 24 * GIB, 23 * GIB)).gpus
    assert 0 <= gpu.adapter_bytes - 4 * 32 * 2 * 400_000 < GIB // 16
    taken = (plain.num_slots - budget.num_slots) * budget.slot_bytes
    assert taken >= gpu.adapter_bytes
    assert f"LoRA adapters {gpu.adapter_bytes / GIB:.2f} GiB" in budget.explain()
    assert "LoRA" not in plain.explain()
    with pytest.raises(ConfigError, match="for LoRA adapters"):
        plan_device(dataclasses.replace(config, max_lora_rank=4096, max_loras=8), needs, 24 * GIB, 23 * GIB)
    several = plan_devices(config, needs, [DeviceMemory(24 * GIB, 23 * GIB)] * 2)
    assert [each.adapter_bytes for each in several.gpus] == [several.gpus[0].adapter_bytes] * 2
    assert several.gpus[0].adapter_bytes > 0


def test_a_device_refuses_caches_that_its_kernels_do_not_read() -> None:
    for requested in ("auto", "bfloat16"):
        assert device_cache_dtype(EngineConfig(kv_cache_dtype=requested)) == "bfloat16"
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype was given 'q8'; on a device the KV cache is bfloat16"
    ):
        device_cache_dtype(EngineConfig(kv_cache_dtype="q8"))
