"""Everything about CUDA that needs a GPU, in the order in which it decides. `make gpu-day` runs this list."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.cases import GPT_OSS, QWEN, Case, expert_cases

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine

Runs = Callable[["Machine"], dict[str, Any]]
"""Returns figures; where an expectation goes with them, "expected" and "holds" (see machine.expect)."""
PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "end to end": "the commands run on the card, how fast, and their logits are the CPU's",
        "basics": "copies, handshake, logits by placement and uploads are right, and at which share of the link",
        "speed": "tokens/s of a 30B model at 25 % slots beside none and all slots; graph against eager; payback "
        "against LRU",
        "server": "a real serve answers, streams and ends by SIGTERM",
        "kernels": "decode kernels of bf16, q8_0, q4_k, mxfp4: errors against f32, share of the VRAM's bandwidth",
        "calibration": "the cost model's figures, and whether fit predicts the measured speed",
        "rest": "other formats and kernels, faults, events, other engines' rules, launching, telemetry",
        "sanitizer": "compute-sanitizer's findings in two kernels",
    }
)
"""Parts of the day, in order, and what each decides."""
NUMBERS: Final = "numbers"
FIGURES: Final = "figures"
SANITIZER: Final = "sanitizer"
SANITIZED: Final = ("decode experts, q8_0", "hits on the GPU and misses by the mailbox, eager")
"""Run again under compute-sanitizer, which is slow: the weights' kernels, and those that wait for the CPU."""
_FIRST_FORMATS: Final = ("bf16", "q8_0", "q4_k", "mxfp4")
_OTHER_FORMATS: Final = ("f32", "f16", "fp8", "q4_0", "int8", "int4", "q5_k", "q6_k")
_TRAINED_FORMATS: Final = ("bf16", "q4_k", "mxfp4")
_SHARES: Final = (0.25, 0.1, 0.5, 0.75)
_CONTROL, _RUNNER = "kernels/cuda/step_control.cu", "engine/twofold/device/runner.py"
_TABLE, _GRAPHS = "engine/twofold/device/table_layers.py", "engine/twofold/device/graphs.py"
_DECODE, _PREFILL = "kernels/cuda/expert_decode.cuh", "kernels/cuda/expert_prefill.cuh"
_SCHEDULER = "engine/core/layer_scheduler.cpp"


@dataclass(frozen=True)
class Check:
    """One entry of the day."""

    name: str
    part: str
    run: Runs
    open: str
    """First file to read if it fails."""
    kind: str = NUMBERS
    """NUMBERS: a failure means wrong results. FIGURES: it means slower than its bound. SANITIZER: under its tool."""
    limit_s: float = 60.0
    """Seconds after which it is ended."""
    needed_s: float = 3.0
    """It does not begin with less time left."""


def _call(module: str, name: str, *arguments: Any) -> Runs:
    """Imported when it runs, because a list needs no torch."""

    def run(machine: Machine) -> dict[str, Any]:
        found: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
        return found(machine, *arguments)

    return run


def _commands(name: str, *arguments: Any) -> Runs:
    return _call("tests.gpu.command_checks", name, *arguments)


def _kernels(name: str, *arguments: Any) -> Runs:
    return _call("tests.gpu.kernel_checks", name, *arguments)


def _engine(name: str, *arguments: Any) -> Runs:
    return _call("tests.gpu.engine_checks", name, *arguments)


def _engine_of(name: str, shape: str, *arguments: Any) -> Runs:
    return _of_shape("tests.gpu.engine_checks", name, shape, *arguments)


def _speed(name: str, shape: str, *arguments: Any) -> Runs:
    return _of_shape("benchmarks.gpu.engine_speed", name, shape, *arguments)


def _of_shape(module: str, name: str, shape: str, *arguments: Any) -> Runs:
    def run(machine: Machine) -> dict[str, Any]:
        from benchmarks.gpu.models import SHAPES

        return _call(module, name, SHAPES[shape], *arguments)(machine)

    return run


def _timed(name: str, *arguments: Any) -> Runs:
    return _call("benchmarks.gpu.kernel_speed", name, *arguments)


def _end_to_end() -> Iterable[Check]:
    part = "end to end"
    yield Check("generate as a process, 25 % slots", part, _commands("generate_as_a_process"), _RUNNER)
    for where, share in (("none", None), ("0 % slots", 0.0), ("25 % slots", 0.25), ("100 % slots", 1.0)):
        run = _commands("bench_and_generate", share)
        yield Check(f"bench and generate, {where}", part, run, _RUNNER)
    yield Check(
        "logits of the bundled model",
        part,
        _commands("logits_by_placement"),
        "engine/twofold/device/model.py",
    )


def _basics() -> Iterable[Check]:
    part = "basics"
    source = "engine/twofold/device/checks/self_check.py"
    yield Check("self-check, long form", part, _engine_of("self_check", QWEN), source, limit_s=90)
    yield Check("copy bandwidth", part, _timed("copy_bandwidth"), "benchmarks/gpu/kernel_speed.py", FIGURES)
    yield Check("handshake per layer", part, _timed("handshake"), _CONTROL, FIGURES)
    cpu = _engine("logits_against_the_cpu_engine")
    yield Check(
        "logits against the engine without a GPU", part, cpu, "engine/twofold/device/model.py", limit_s=90
    )
    for batch in (1, 4):
        run = _engine_of("logits_for_every_placement", QWEN, batch)
        yield Check(f"logits for every placement, {QWEN}, batch of {batch}", part, run, _TABLE, limit_s=90)
    uploads = "engine/runtime/device/upload_engine.cpp"
    yield Check("uploads beside the link", part, _speed("uploads", QWEN), uploads, FIGURES)


def _whole_model() -> Iterable[Check]:
    part, module = "speed", "benchmarks.gpu.whole_model"
    run = _call(module, "decode_and_prefill")
    yield Check("decode and prefill at full depth", part, run, _SCHEDULER, FIGURES, limit_s=180, needed_s=60)
    run = _speed("graph_against_eager", QWEN, 0.25)
    yield Check(f"graph against eager, {QWEN}", part, run, _GRAPHS, FIGURES, limit_s=90, needed_s=10)


def _first_kernels() -> Iterable[Check]:
    for name in _FIRST_FORMATS:
        yield Check(f"decode experts, {name}", "kernels", _kernels("decode_experts", name), _DECODE)
    for name in _FIRST_FORMATS:
        for tokens in (1, 8):
            yield _timed_kernel("kernels", ("decode", QWEN, name, tokens))


def _timed_kernel(part: str, case: Case) -> Check:
    kind, shape, format, tokens = case
    source = _DECODE if kind == "decode" else _PREFILL
    return Check(f"{kind} {shape} {format} {tokens} tokens", part, _timed(*case), source, FIGURES)


def _calibration() -> Iterable[Check]:
    part, source = "calibration", "engine/twofold/device/calibration.py"
    yield Check(f"calibration, {QWEN}", part, _speed("calibration", QWEN), source, FIGURES, 120, 15)
    fit = _call("benchmarks.gpu.whole_model", "fit_estimate")
    yield Check(
        "fit's prediction against measured", part, fit, "engine/twofold/fit/speed.py", FIGURES, 180, 5
    )
    cost = "engine/core/cost_model.cpp"
    run = _speed("estimates", QWEN, 0.25)
    yield Check(f"predicted against measured, {QWEN}", part, run, cost, FIGURES)


def _other_numbers() -> Iterable[Check]:
    part = "rest"
    attention = "kernels/cuda/decode_attention.cu"
    yield Check("routing", part, _kernels("routing"), "kernels/cuda/route_rope.cu")
    yield Check("rotation, KV store and decode attention", part, _kernels("attention"), attention)
    yield Check("latent attention", part, _kernels("latent_attention"), "kernels/cuda/mla_attention.cu")
    yield Check("indexers", part, _kernels("indexers"), "kernels/cuda/indexer.cu")
    yield Check("gated delta nets", part, _kernels("gated_delta_nets"), "kernels/cuda/gated_delta.cu")
    yield Check("low-rank products of adapters", part, _kernels("adapters"), "kernels/cuda/low_rank.cu")
    yield Check("handshake probe", part, _kernels("handshake_probe"), _CONTROL)
    for mode, graph in (("eager", False), ("one graph", True)):
        yield Check(
            f"hits on the GPU and misses by the mailbox, {mode}", part, _kernels("hybrid", graph), _CONTROL
        )
    yield Check("a step without a server is given up", part, _kernels("watchdog"), _CONTROL)
    for name in _OTHER_FORMATS:
        yield Check(f"decode experts, {name}", part, _kernels("decode_experts", name), _DECODE)
    for name in (*_FIRST_FORMATS, *_OTHER_FORMATS[1:]):  # f32 has no prefill kernel
        yield Check(f"prefill experts, {name}", part, _kernels("prefill_experts", name), _PREFILL)
    for name in _TRAINED_FORMATS:
        source = "kernels/cuda/unpack_matrix.cu"
        yield Check(f"training experts, {name}", part, _kernels("training_experts", name), source)
    for mode in ("graph", "eager", "placed"):
        run = _engine("frozen_placement", mode)
        yield Check(f"placement frozen, two runs bit-identical, {mode}", part, run, _TABLE)
    yield Check("a lost step costs no request", part, _engine("lost_step"), _RUNNER)
    for mode in ("graph", "placed"):
        run = _engine("every_event_is_reported", mode)
        source = "engine/runtime/device/device_accelerator.cpp"
        yield Check(f"every placement, upload and eviction is reported, {mode}", part, run, source)
    run = _engine_of("logits_for_further_placements", QWEN)
    yield Check(f"logits for further placements, {QWEN}", part, run, _TABLE, limit_s=90)
    run = _engine_of("logits_for_every_placement", GPT_OSS, 1)
    yield Check(f"logits for every placement, {GPT_OSS}, batch of 1", part, run, _TABLE, limit_s=90)


def _other_figures() -> Iterable[Check]:
    part = "rest"
    yield Check(
        "torch's bf16 product", part, _timed("torch_product"), "benchmarks/gpu/kernel_speed.py", FIGURES
    )
    done = {check.name for check in _first_kernels()}
    for check in (_timed_kernel(part, case) for case in expert_cases()):
        if check.name not in done:
            yield check
    for shape in (QWEN, GPT_OSS):
        if shape is GPT_OSS:
            source = "engine/twofold/device/calibration.py"
            yield Check(f"calibration, {shape}", part, _speed("calibration", shape), source, FIGURES, 120, 15)
        yield Check(f"launching a step, {shape}", part, _speed("launch_share", shape), _GRAPHS, FIGURES)
        telemetry = _speed("telemetry_cost", shape, 0.25)
        yield Check(
            f"telemetry's cost, {shape}", part, telemetry, "engine/twofold/telemetry/run_writer.py", FIGURES
        )
        yield Check(f"policy per layer, {shape}", part, _speed("policy_cost", shape), _SCHEDULER, FIGURES)
        beside = _speed("cpu_beside", shape)
        source = "engine/runtime/device/mailbox_experts.cpp"
        yield Check(f"a layer's experts on the CPU, {shape}", part, beside, source, FIGURES)
        for share in _SHARES:
            run = _speed("rules_at", shape, share)
            yield Check(f"rules at {share:.0%} slots, {shape}", part, run, _SCHEDULER, FIGURES, 120, 15)


def checks() -> list[Check]:
    """All of them, in order. The sanitizer's results count for both again."""
    plain = [
        *_end_to_end(), *_basics(), *_whole_model(),
        Check("serve, stream and SIGTERM", "server", _commands("serve_and_stream"), "engine/twofold/server/process.py"),
        *_first_kernels(), *_calibration(), *_other_numbers(), *_other_figures(),
    ]  # fmt: skip
    again = [check for check in plain if check.name in SANITIZED]
    return plain + [
        Check(
            f"sanitizer: {check.name}", SANITIZER, check.run, check.open, SANITIZER, limit_s=90, needed_s=10
        )
        for check in again
    ]


def chosen(patterns: str) -> list[Check]:
    """Checks whose name, part or kind matches one of the patterns, which semicolons part. ValueError: none does."""
    wanted = [pattern.strip() for pattern in patterns.split(";")]
    found = [
        check
        for check in checks()
        if any(fnmatch.fnmatch(word, one) for word in (check.name, check.part, check.kind) for one in wanted)
    ]
    if not found:
        raise ValueError(
            f"ONLY was given {patterns!r}, which is none of the checks; expected names, or parts: {', '.join(PARTS)}"
        )
    return found
