"""Rules for modules while an engine runs: pins hold, threads change nothing, formats are those of quantised files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.engine import Engine
from twofold.engine.module_rules import apply_rules
from twofold.engine.packing import pack_directory
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.profiles import load_profile
from twofold.models.derived_model import fingerprint, source_config, write_tokenizer
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.quantise.directory import OutputDirectory
from twofold.quantise.recipe import make_recipe
from twofold.quantise.rules import Rules
from twofold.quantise.rules import read_rules as read_quantise_rules
from twofold.rules.decisions import decide
from twofold.rules.placement import parse_placement_rules
from twofold.rules.yaml_file import parse_yaml

from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

LAYERS, EXPERTS = 4, 8
PROMPT = tuple(range(5, 85))
"""Long enough that layers are uploaded ahead."""
EMULATED = "emulated:rtx4090-pcie4"
PINS = """
- {match: {class: experts, layers: 1}, device: gpu}
- {match: {class: experts, layers: [2]}, device: cpu}
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = TinyModel(
        dtype="bfloat16", num_layers=LAYERS, num_experts=EXPERTS, hidden_size=64, moe_intermediate_size=64
    )
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), model))


@pytest.fixture(scope="module")
def plain(model_dir: str) -> list[int]:
    engine = load(model_dir, accelerator="none")
    tokens = answer(engine)
    engine.close()
    return tokens


def load(model_dir: str, rules: str = "", folder: Path | None = None, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"accelerator": EMULATED, "gpu_experts_ratio": 0.5, "cpu_threads": 1}
    if rules:
        assert folder is not None
        (folder / "r.yaml").write_text(rules)
        settings["optimize_config"] = str(folder / "r.yaml")
    return Engine.load(EngineConfig(model=model_dir, **{**settings, **changes}))


def answer(engine: Engine, max_tokens: int = 40, each: Any = None) -> list[int]:
    tokens: list[int] = []

    def take(chunk: Any) -> None:
        tokens.extend(chunk.token_ids)
        if each is not None:
            each()

    engine.generate(
        PROMPT, SamplingParams(temperature=0.9, seed=7, max_tokens=max_tokens, ignore_eos=True), take
    )
    return tokens


@pytest.mark.parametrize("policy", ["payback", "lru", "lfru"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
def test_pins_hold_and_change_no_answer(
    model_dir: str, plain: list[int], tmp_path: Path, policy: str, ratio: float
) -> None:
    engine = load(model_dir, PINS, tmp_path, policy=policy, gpu_experts_ratio=ratio, prefetch="auto")
    moe = engine.runner.moe
    moe.executor.events_enabled = True
    uploads, routed = [], []

    def look() -> None:
        placement = moe.executor.placement()
        assert placement is not None
        assert (placement[0][1] == 2).all()
        assert (placement[0][2] == 0).all()
        events = moe.drain_events()
        uploads.append(events["upload"])
        routed.append(events["token_layer"])

    look()
    assert answer(engine, each=look) == plain
    moved, layers = np.concatenate(uploads), np.concatenate(routed)
    assert not {1, 2} & set(moved["layer"].tolist())
    counts = engine.stats().placement
    assert counts.hits > 0
    if ratio == 1.0:
        assert set(moved["layer"].tolist()) == set()
    else:
        assert set(moved["layer"].tolist()) <= {0, 3} != set()
    assert len(layers) > 0
    engine.close()


def test_pins_survive_other_sizes_sleep_and_a_warm_start(
    model_dir: str, plain: list[int], tmp_path: Path
) -> None:
    state = str(tmp_path / "cache.state")
    free = load(model_dir, cache_state=state)  # which leaves experts of every layer in slots
    assert answer(free) == plain
    free.close()
    engine = load(model_dir, PINS, tmp_path, cache_state=state)
    moe = engine.runner.moe

    def held() -> list[int]:
        placement = moe.executor.placement()
        assert placement is not None
        return [int((row > 0).sum()) for row in placement[0]]

    assert held()[1:3] == [EXPERTS, 0]
    with pytest.raises(ConfigError, match=r"pins 8 experts .1 layers of 8. to the GPU; there are 6 slots"):
        engine.control.resize(Resize(gpu_experts_ratio=0.2))
    assert held()[1:3] == [EXPERTS, 0]
    for ratio, slots in ((0.25, 8), (1.0, 24)):
        split = engine.control.resize(Resize(gpu_experts_ratio=ratio))
        assert split.num_slots == moe.num_slots == slots
        assert held()[1:3] == [EXPERTS, 0]
        assert answer(engine) == plain
    wanted = np.zeros((LAYERS, EXPERTS), bool)
    wanted[[0, 2], :3] = True
    moe.place_experts(wanted)
    assert held() == [3, EXPERTS, 0, 0]
    engine.control.sleep()
    engine.control.wake()
    assert held()[1:3] == [EXPERTS, 0]
    assert answer(engine) == plain
    engine.close()


@pytest.mark.parametrize(
    ("rules", "changes", "message"),
    [
        (PINS, {"gpu_experts_ratio": 0.2},
         "pins 8 experts .1 layers of 8. to the GPU; there are 6 slots: give --gpu-experts-ratio of at least 0.25"),
        (PINS, {"expert_placement_strategy": "random"}, "places all experts and --optimize-config pins some"),
        (PINS, {"accelerator": "none"}, r"r.yaml:2: device gpu .* no accelerator"),
        ("- {match: all, threads: 9}", {}, "threads 9 was given, but the engine has 1; raise --cpu-threads"),
        ("- {match: all, format: q8_0}", {"packed_cache": "cache"}, "but --packed-cache keeps"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_before_anything_is_loaded(
    model_dir: str, tmp_path: Path, rules: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(model_dir, rules, tmp_path, **changes)


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            "device: cpu",
            "r.yaml:1: device cpu was given for lm_head, which is part of the device's decode graph",
        ),
        ("backend: generic", "r.yaml:1: backend generic was given for lm_head, which runs on the GPU"),
    ],
)
def test_a_gpu_is_not_asked_for_dense_modules_on_the_cpu(
    model_dir: str, tmp_path: Path, requested: str, message: str
) -> None:
    (tmp_path / "r.yaml").write_text(f"- {{match: {{class: head}}, {requested}}}")
    config = EngineConfig(model=model_dir, optimize_config=str(tmp_path / "r.yaml"))
    with pytest.raises(ConfigError, match=message):
        apply_rules(
            config, open_model_files(model_dir), ops.ThreadPool(1), AcceleratorChoice("cuda", "a test")
        )


HANDOVERS = {
    "match: {class: embedding}": [1, 0, 0, 0, 0],
    "match: {class: head}": [0, 0, 0, 0, 1],
    "match: {class: attention}": [1, 1, 1, 1, 0],
    "match: {class: attention, layers: [2]}": [0, 0, 1, 0, 0],
    "match: all": [1, 1, 1, 1, 1],
}
"""Handovers in each stretch between experts; neighbouring modules share one."""


@pytest.mark.parametrize(("match", "handovers"), HANDOVERS.items())
def test_dense_modules_on_the_cpu_take_its_time_on_the_emulated_clock(
    model_dir: str, plain: list[int], tmp_path: Path, match: str, handovers: list[int]
) -> None:
    engine = load(
        model_dir, f"- {{{match}, device: cpu}}", tmp_path, prefetch="off"
    )  # which reads routers again
    assert answer(engine) == plain
    dense_us, *_, head_us = engine.runner.moe.clock_parts()
    engine.close()
    files = open_model_files(model_dir)
    rules = parse_placement_rules(parse_yaml(f"- {{{match}, device: cpu}}", "r.yaml"))
    stretches: list[dict[str, list[float]]] = [{"cpu": [0.0, 0.0], "gpu": [0.0, 0.0]}]
    for decision in decide(files, rules, None)[1]:
        part, weights = decision.module.part, decision.module.weights
        if isinstance(part, ExpertBlock):
            stretches.append({"cpu": [0.0, 0.0], "gpu": [0.0, 0.0]})
        elif part.kind != "embedding":
            cost, to = part.cost(weights), stretches[-1]["cpu" if decision.device == "cpu" else "gpu"]
            to[0] += cost.num_bytes
            to[1] += cost.flops
    figures = load_profile("rtx4090-pcie4").cost_figures

    def passed_us(stretch: dict[str, list[float]], times: int) -> float:
        on = {"cpu": ("cpu_bandwidth_gbps", "cpu_gflops"), "gpu": ("vram_bandwidth_gbps", "gpu_gflops")}
        us = 0.0
        for tokens, steps in ((len(PROMPT), 1), (1, 39)):
            fixed = figures["gpu_launch_us"] + times * figures["handshake_us"]
            us += steps * fixed
            for side, (num_bytes, flops) in stretch.items():
                bandwidth, gflops = (figures[name] * 1e3 for name in on[side])
                us += steps * max(num_bytes / bandwidth, flops * tokens / gflops)
        return us

    *before, last = map(passed_us, stretches, handovers)
    assert dense_us == pytest.approx(sum(before))
    assert head_us == pytest.approx(last)


def test_threads_and_shipped_rules_change_no_answer(model_dir: str, plain: list[int], tmp_path: Path) -> None:
    rules = """
- {match: {class: experts, layers: [0, 2]}, threads: 2}
- {match: {class: [attention, head]}, threads: 1}
- {match: {class: embedding}, threads: 2}
"""
    for engine in (
        load(model_dir, rules, tmp_path, cpu_threads=3),
        load(model_dir, rules, tmp_path, cpu_threads=3, accelerator="none"),
        load(model_dir, optimize_config="shipped"),
    ):
        assert answer(engine) == plain
        engine.close()


def test_placement_does_not_depend_on_the_kernel_level(model_dir: str, tmp_path: Path) -> None:
    rules = """
- {match: {class: experts, layers: [0, 2]}, backend: generic}
- {match: {class: [attention, head], layers: 0-2}, backend: generic, threads: 1}
"""
    tokens = []
    for accelerator in ("none", EMULATED):
        engine = load(model_dir, rules, tmp_path, cpu_threads=2, accelerator=accelerator)
        tokens.append(answer(engine))
        engine.close()
    assert tokens[0] == tokens[1]


def test_a_limit_leaves_the_other_threads_idle() -> None:
    def ticks() -> dict[str, int]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[task.name] = int(fields[11]) + int(fields[12])
        return found

    before = ticks()
    pool = ops.ThreadPool(3)
    workers = ticks().keys() - before.keys()
    assert len(workers) == 2
    rows = np.ones((512, 4096), np.float32)

    def worked(limit: int, longest_s: float) -> int:
        """Hundredths of a second, as soon as there are some."""
        pool.limit(limit)
        time.sleep(0.01)
        begun, end, found = ticks(), time.monotonic() + longest_s, 0
        while time.monotonic() < end and found <= 1:
            ops.quantise_rows(pool, rows, "q8_0")
            now = ticks()
            found = sum(now[worker] - begun[worker] for worker in workers)
        return found

    assert worked(1, 0.25) <= 1 < worked(0, 60.0)
    for wrong in (-1, 4):
        with pytest.raises(ConfigError, match="expected 0 to 3"):
            pool.limit(wrong)


def test_formats_keep_stored_prefixes_apart_and_leave_packed_models_alone(
    model_dir: str, tmp_path: Path
) -> None:
    """Pages of another run that were computed with other weights are not taken for this run's."""
    answers = []
    rules = "- {match: all, format: q8_0}"
    for text, store in (("", True), (rules, True), (rules, False)):
        directory = str(tmp_path / "prefixes") if store else None
        engine = load(model_dir, text, tmp_path, accelerator="none", prefix_cache_dir=directory)
        answers.append(answer(engine, 16))
        engine.close()
    assert answers[0] != answers[1] == answers[2]
    pool = ops.ThreadPool(1)
    pack_directory(open_model_files(model_dir), Path(model_dir), tmp_path / "packed", pool)
    with pytest.raises(ConfigError, match=r"r.yaml:1: format q8_0 .* this model is packed"):
        load(str(tmp_path / "packed"), rules, tmp_path)


SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_layers": 2, "num_experts": 4}
MODELS = {
    "separate": TinyModel(dtype="bfloat16", **SIZES),
    "fused": TinyModel(dtype="bfloat16", expert_layout="fused", tie_word_embeddings=True, **SIZES),
    "shared": tiny("deepseek_v3", first_k_dense_replace=0, q_lora_rank=64, v_head_dim=16, **SIZES),
    "turned": tiny("llama4", expert_layout="fused", **SIZES),
    "biases": tiny("gpt_oss", **SIZES),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_format_is_that_of_the_quantised_file(tmp_path: Path, name: str) -> None:
    source = write_tiny_model(tmp_path / "source", MODELS[name])
    pool = ops.ThreadPool(2)
    (tmp_path / "q.yaml").write_text(
        "format: int4\nrules:\n- {blocks: [attention, embedding, head], format: q8_0}\n"
    )
    written = quantised(source, tmp_path / "out", read_quantise_rules(tmp_path / "q.yaml"), pool)
    rules = """
- {match: {class: [attention, embedding, head]}, format: q8_0}
- {match: all, format: int4}
"""
    files, _ = decide(open_model_files(source), parse_placement_rules(parse_yaml(rules, "r.yaml")), pool)
    assert (
        files.expert_formats() == written.expert_formats() == (("int4",) * 3,) * len(files.expert_formats())
    )
    theirs, ours = matrices(written), matrices(files)
    assert theirs.keys() == ours.keys()
    for part, (format, found) in ours.items():
        assert format == theirs[part][0]
        np.testing.assert_array_equal(found, theirs[part][1], err_msg=part)
    (tmp_path / "r.yaml").write_text(rules)
    answers = []
    for directory, optimize_config in ((source, str(tmp_path / "r.yaml")), (tmp_path / "out", None)):
        engine = load(str(directory), optimize_config=optimize_config, accelerator="none")
        answers.append(answer(engine, 16))
        engine.close()
    assert answers[0] == answers[1]


def quantised(source: Path, output: Path, rules: Rules, pool: ops.ThreadPool) -> ModelFiles:
    files = open_model_files(source)
    out = OutputDirectory(output, make_recipe(files, rules, pool), source, fingerprint(files, str(rules)))
    assert not out.begin()
    out.write()
    out.finish(source_config(source, files.config), lambda: write_tokenizer(source, output, files.config))
    return open_model_files(output)


def matrices(files: ModelFiles) -> dict[str, tuple[str, np.ndarray]]:
    """The weights of a model by what they do: format and bytes."""
    found: dict[str, Any] = {}
    for index, (part, weights) in enumerate(files.parts()):
        if isinstance(part, ExpertBlock):
            for expert, parts in enumerate(files.expert_weights(part.layer)):
                found |= {f"{index}.{expert}.{place}": each for place, each in enumerate(parts)}
            continue
        found |= {
            f"{index}.{name}": weights.matrix(name)
            for name, spec in weights.specs.items()
            if len(spec.shape) == 2 and spec.role != "exact"
        }
    return {name: (matrix.format, np.array(matrix.data)) for name, matrix in found.items()}
