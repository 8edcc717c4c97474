"""The automatic fit: what it chooses for a machine, what it keeps, what it says when nothing fits."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.device.finding import choose_accelerator
from twofold.device.memory.budget import DeviceMemory, plan_device
from twofold.device.memory.needs import needs_of
from twofold.device.memory.pipeline import plan_machine
from twofold.engine import Engine
from twofold.experts.device_split import device_split, split_slots
from twofold.experts.profiles import load_profile
from twofold.fit.machine import emulated_machine, fit_here
from twofold.fit.plan import FitPlan, Machine, plan_fit
from twofold.fit.speed import device_speed
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.main import main

from benchmarks.models.gguf_model import write_model
from benchmarks.models.shapes import FULL_SHAPES
from tests.tiny_models.writing import TinyModel, write_tiny_model

GIB = 2**30
CONTEXT = 40_960


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Headers of Qwen3-30B-A3B in Q4_K, with a small vocabulary."""
    path = tmp_path_factory.mktemp("fit") / "model.gguf"
    shape = replace(FULL_SHAPES["qwen3-30b-a3b"], vocab=4096, context=CONTEXT)
    write_model(path, shape, "q4_k", is_sparse=True)
    return open_model_files(path)


def fit(files: ModelFiles, host_gib: float, vram_gib: float | None = None, **given: Any) -> FitPlan:
    memories = () if vram_gib is None else (DeviceMemory(*(int(vram_gib * GIB),) * 2),)
    machine = Machine(int(host_gib * GIB), "cuda" if memories else "none", "a test", memories, threads=8)
    return plan_fit(EngineConfig(**given), given.keys(), files, machine)


def test_a_large_machine_gets_the_whole_context_and_eight_of_them(files: ModelFiles) -> None:
    plan = fit(files, 256)
    assert plan.fits
    assert plan.config.max_model_len is None
    assert plan.config.max_total_tokens == 8 * CONTEXT
    assert plan.config.kv_cache_dtype == "auto"
    assert plan.config.cpu_threads == 8
    flags = [choice.flag for choice in plan.choices]
    assert flags == [
        "--accelerator", "--max-model-len", "--max-total-tokens", "--kv-cache-dtype", "--cpu-threads", "--backend",
    ]  # fmt: skip
    assert all(choice.why for choice in plan.choices)


def test_a_smaller_machine_gets_a_smaller_cache_type_then_a_shorter_context(files: ModelFiles) -> None:
    weights = measure_files(files).host_bytes(0)
    by_type = {kind: measure_files(files, kv_cache_dtype=kind).kv_bytes_per_token for kind in ("auto", "q8")}
    in_q8 = fit(files, (weights + 1.1 * CONTEXT * by_type["q8"]) / GIB)
    assert in_q8.config.kv_cache_dtype == "q8"
    assert in_q8.context == CONTEXT
    short = fit(files, (weights + 4096 * by_type["q8"]) / GIB)
    assert 3500 < (short.config.max_model_len or 0) <= 4096
    assert short.fits
    kept = fit(files, (weights + 1.1 * CONTEXT * by_type["q8"]) / GIB, kv_cache_dtype="auto")
    assert kept.config.kv_cache_dtype == "auto"
    assert kept.context < CONTEXT
    assert "given" in {choice.why for choice in kept.choices}


def test_the_error_of_a_too_large_model_names_what_would_fit(files: ModelFiles) -> None:
    plan = fit(files, 8)
    assert not plan.fits
    text = "\n".join(plan.lines())
    assert "fit: does not fit: weights and working memory take" in text
    assert "8.00 GiB of memory are available" in text
    assert "would fit: a machine with" in text
    tokens = fit(files, 24, max_total_tokens=10_000_000)
    assert "--max-total-tokens 10000000 needs more memory" in tokens.problem
    fitting = int(tokens.remedies[0].split()[-1])
    assert fit(files, 24, max_total_tokens=fitting).fits


def test_every_fit_is_accepted_by_the_sizes_it_is_built_from(files: ModelFiles) -> None:
    """Sweep of machines: the chosen context always fits, and more memory never gives less."""
    contexts = []
    for gib in range(8, 40):
        plan = fit(files, gib)
        contexts.append(plan.context)
        if plan.fits:
            size = measure_files(files, kv_cache_dtype=plan.config.kv_cache_dtype)
            assert size.host_bytes(plan.config.max_total_tokens or 0) <= gib * GIB
    usual = [min(context, 32_768) for context in contexts]  # beyond it, precision comes first
    assert usual == sorted(usual)
    assert contexts[0] == 0
    assert contexts[-1] == CONTEXT


def test_one_request_at_a_time_uses_the_single_backend(files: ModelFiles) -> None:
    assert fit(files, 64, max_num_seqs=1).config.backend == "single"
    assert fit(files, 64).config.backend == "balance"


@pytest.mark.parametrize("vram_gib", [12, 24, 80])
def test_a_card_gets_the_slots_that_fit_beside_the_context(files: ModelFiles, vram_gib: int) -> None:
    plan = fit(files, 64, vram_gib)
    assert plan.context >= 32_768
    budget = plan_device(plan.config, needs_of(measure_files(files)), *(vram_gib * GIB,) * 2)
    assert budget.num_slots == pytest.approx(plan.num_slots, abs=budget.num_experts / 1000)
    assert (plan.num_slots == budget.num_experts) == (vram_gib >= 24)


def test_a_given_ratio_is_kept(files: ModelFiles) -> None:
    plan = fit(files, 64, 24, gpu_experts_ratio=0.1)
    assert plan.config.gpu_experts_ratio == 0.1
    assert ("--gpu-experts-ratio", "given") in {(choice.flag, choice.why) for choice in plan.choices}


def possible(files: ModelFiles, config: EngineConfig, vram: int) -> Iterator[int]:
    """Slots of every ratio that fits beside the same KV cache."""
    for percent in range(0, 101, 5):
        requested = dataclasses.replace(config, gpu_experts_ratio=percent / 100)
        try:
            yield plan_device(requested, needs_of(measure_files(files)), vram, vram).num_slots
        except ConfigError:
            return


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["rtx3060-pcie3", "rtx4090-pcie4"])
def test_the_chosen_split_is_near_the_best_of_a_sweep(files: ModelFiles, profile: str) -> None:
    machine = load_profile(profile)
    vram = int(machine.figures["vram_gb"].value * 1e9)
    plan = plan_fit(
        EngineConfig(),
        (),
        files,
        Machine(64 * GIB, f"emulated:{profile}", "asked for", (DeviceMemory(vram, vram),), threads=8),
    )
    chosen = device_speed(files, machine, [plan.num_slots], 4096).decode
    config = dataclasses.replace(plan.config, gpu_experts_ratio=None, max_total_tokens=32_768)
    speeds = {
        slots: device_speed(files, machine, [slots], 4096).decode for slots in possible(files, config, vram)
    }
    assert len(speeds) > 3
    assert chosen >= 0.97 * max(speeds.values()), (plan.num_slots, speeds)


def test_the_accelerator_is_shown_as_it_was_asked_for(files: ModelFiles) -> None:
    machine = Machine(64 * GIB, "none", "no CUDA device was found", threads=8)
    for given, why in (
        ((), "none: no CUDA device was found"),
        (("accelerator",), "given; none: no CUDA device was found"),
    ):
        choice = plan_fit(EngineConfig(), given, files, machine).choices[0]
        assert (choice.flag, choice.value, choice.why) == ("--accelerator", "auto", why)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--max-model-len", "512", "--cpu-threads", "1", "--accelerator", "none"]) == 0
    shown = capsys.readouterr().out
    assert "--max-model-len" in shown
    assert "given" in shown
    assert "tokens/s decode at context 512" in shown
    assert "for 8 requests of full length" in shown
    lines = shown.splitlines()
    assert re.match(r"fit: twofold-tales fits: it needs [\d.]+ GiB of the [\d.]+ GiB", lines[0])
    assert "one request of 512 tokens" in lines[0]
    assert lines[-1] == "ready: twofold serve --max-model-len 512 --cpu-threads 1 --accelerator none"
    assert (
        main(["fit", "--max-total-tokens", "999999999", "--cpu-threads", "1", "--accelerator", "none"]) == 1
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "fit: twofold-tales cannot be served here: --max-total-tokens 999999999 needs "
    )
    assert lines[-1].startswith("  would fit: ")
    assert main(["fit", "--json", "--cpu-threads", "1", "--accelerator", "emulated:rtx3060-pcie3"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["fits"]
    assert reported["predicted"]["decode"] > 0
    assert any(choice["flag"] == "--gpu-experts-ratio" for choice in reported["choices"])


def test_the_emulated_ratio_is_what_the_engine_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--cpu-threads",
        "1",
        "--accelerator",
        "emulated:rtx3060-pcie3",
        "--gpu-experts-ratio",
        "0.5",
    ]
    assert main(["fit", "--json", *arguments]) == 0
    choices = {c["flag"]: c for c in json.loads(capsys.readouterr().out)["choices"]}
    assert (choices["--gpu-experts-ratio"]["value"], choices["--gpu-experts-ratio"]["why"]) == (
        "0.5",
        "given",
    )


@pytest.mark.parametrize("sizes", [(12, 8), (8, 12), (6, 6), (24, 24)])
def test_two_gpus_get_the_slots_that_the_loader_gives_them(files: ModelFiles, sizes: tuple[int, int]) -> None:
    names = ("cuda:0", "cuda:1")
    memories = tuple(DeviceMemory(gib * GIB, gib * GIB) for gib in sizes)
    machine = Machine(64 * GIB, "+".join(names), "a test", memories, names, threads=8)
    plan = plan_fit(EngineConfig(), (), files, machine)
    assert plan.num_slots >= max(fit(files, 64, gib).num_slots for gib in sizes)
    assert sum(plan.device_slots) == plan.num_slots
    _, budget = plan_machine(plan.config, plan.size, names, memories)  # raises where a card has no room
    held = split_slots(budget.num_slots, budget.shares, budget.num_experts)
    assert held == pytest.approx(plan.device_slots, abs=0.001 * budget.num_experts)
    (reported,) = (choice for choice in plan.choices if choice.flag == "--tensor-split")
    assert reported.value == ",".join(map(str, plan.device_slots))
    homes = budget.homes or (0,) * 48
    for device, name in enumerate(names):
        layers = f"dense weights of {homes.count(device)} layers, " if device in homes else ""
        assert f"{name}: {layers}{plan.device_slots[device]} experts (" in reported.why


def test_emulated_cards_each_get_what_they_have_room_for(files: ModelFiles) -> None:
    choice = choose_accelerator("emulated:rtx3060-pcie3+rtx4090-pcie4")[0]
    machine, profile = emulated_machine(Machine(64 * GIB, choice.label, choice.reason, threads=8), choice)
    assert profile is not None
    assert machine.devices == ("rtx4090-pcie4", "rtx3060-pcie3")  # the fastest first, as --tensor-split
    config = EngineConfig(max_total_tokens=65_536)
    plan = plan_fit(config, {"max_total_tokens"}, files, machine)
    slots = split_slots(plan.num_slots, device_split(plan.config.tensor_split, profile), 48 * 128)
    slot_bytes = needs_of(plan.size).slot_bytes
    assert plan.num_slots == sum(slots)
    for count, memory in zip(slots, machine.memories, strict=True):
        assert 0 < count * slot_bytes < memory.total_bytes


def test_the_engine_has_the_slots_of_the_table(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, TinyModel())
    config = EngineConfig(model=str(model), accelerator="emulated:rtx4090-pcie4+rtx3060-pcie3", cpu_threads=1)
    plan = fit_here(config, {"cpu_threads"}, open_model_files(model))
    assert plan.speed is not None
    engine = Engine.load(plan.config)
    assert ",".join(map(str, engine.runner.moe.device_slots)) == plan.config.tensor_split
    engine.close()


def test_a_split_for_other_devices_is_refused(files: ModelFiles) -> None:
    machine = Machine(64 * GIB, "cuda:0+cuda:1", "", (DeviceMemory(GIB, GIB),) * 2, ("cuda:0", "cuda:1"))
    with pytest.raises(ConfigError, match="--tensor-split 1,1,1 has 3 shares; the machine has 2 devices"):
        plan_fit(EngineConfig(tensor_split="1,1,1"), {"tensor_split"}, files, machine)
