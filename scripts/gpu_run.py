"""What gpu_test.py and gpu_bench.py share: building, running checks into a JSON, experts with a reference."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from twofold.experts.device_experts import DeviceExperts

ROOT = Path(__file__).resolve().parents[1]
Check = Callable[[], dict[str, Any]]


def add_options(parser: argparse.ArgumentParser, output: str) -> None:
    """The flags of both scripts."""
    parser.add_argument("--no-build", action="store_true", help="use what is built beside the sources")
    parser.add_argument("--dry-run", action="store_true", help="build nothing, run no check, list them all")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / output, help="where figures go")


def build() -> None:
    """Compile both native modules for this machine's GPU into engine/twofold."""
    folder = ROOT / "build/gpu"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [
        "-DTWOFOLD_INPLACE=ON",
        "-DTWOFOLD_CUDA=AUTO",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1)], check=True)


def run(options: argparse.Namespace, checks: Sequence[tuple[str, Check]]) -> int:
    """Build, run every check, leave the JSON. See the scripts for the exit status."""
    report: dict[str, Any] = {"commit": commit(), "device": None, "why_no_device": None, "checks": []}
    started = time.perf_counter()
    if not options.dry_run and not options.no_build:
        build()
    sys.path.insert(0, str(ROOT / "engine"))
    from twofold.experts.device_experts import devices

    found, why = devices()
    report["device"], report["why_no_device"] = (found[0] if found else None), why
    ready = bool(found) and not options.dry_run
    if ready:
        import torch

        ready = torch.cuda.is_available()
        report["torch"] = torch.__version__
        report["why_no_device"] = why if ready else "this torch does not use CUDA"
    for name, check in checks:
        entry: dict[str, Any] = {"name": name, "state": "not run"}
        if ready:
            begin = time.perf_counter()
            try:
                entry |= {"state": "passed", "figures": check()}
            except Exception as error:  # every check is to be tried, and the report to be written
                entry |= {"state": "failed", "error": str(error), "trace": traceback.format_exc()}
            entry["seconds"] = round(time.perf_counter() - begin, 3)
        report["checks"].append(entry)
        print(f"{entry['state']:8} {name} {entry.get('figures', entry.get('error', ''))}", flush=True)
    report["seconds"] = round(time.perf_counter() - started, 1)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    print(f"written to {options.json}")
    if not ready:
        print(f"nothing was run: {report['why_no_device'] or 'dry run'}", file=sys.stderr)
        return 0 if options.dry_run else 3
    return int(any(entry["state"] == "failed" for entry in report["checks"]))


def commit() -> str:
    """The commit of this checkout, with "+" where it was changed; "" outside git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


@functools.cache
def working_hand_overs() -> tuple[str, ...]:
    """The ways to hand over that this device has."""
    from twofold.experts.device_experts import probe_hand_overs

    return tuple(probe["kind"] for probe in probe_hand_overs(256)["probes"] if probe["works"])


@dataclass
class Case:
    """One MoE layer's experts, a batch and its routing; tensors are on the device."""

    format: str
    top_k: int
    matrices: list[tuple[Any, Any, Any]]
    """WeightMatrix gate, up, down of every expert."""
    dense: list[tuple[Tensor, Tensor, Tensor]]
    """The same, f32."""
    normed: Tensor
    ids: Tensor
    weights: Tensor
    residual: Tensor

    def device_experts(
        self, resident: int, hand_over: str = "kernels", watchdog_s: float = 5.0, num_layers: int = 1
    ) -> DeviceExperts:
        """The first `resident` experts in slots, in every layer the same."""
        from twofold.experts.device_experts import DeviceExperts, pack_expert

        packed = [
            pack_expert(*expert) if number < resident else None for number, expert in enumerate(self.matrices)
        ]
        intermediate, hidden = self.dense[0][0].shape
        layout = (self.format, self.format, hidden, intermediate)
        tokens = min(len(self.normed), 32)
        return DeviceExperts([packed] * num_layers, layout, self.top_k, tokens, hand_over, watchdog_s)

    def reference(self, num_layers: int = 1) -> Tensor:
        """In f32 from the dequantised weights; every layer adds the same to the residual."""
        out = self.normed.float().new_zeros(self.residual.shape)
        x = self.normed.float()
        for expert, (gate, up, down) in enumerate(self.dense):
            share = (self.weights * (self.ids == expert)).sum(1, keepdim=True)
            gated = x @ gate.T
            out += share * ((gated * gated.sigmoid() * (x @ up.T)) @ down.T)
        return self.residual + num_layers * out

    def server(self, experts: DeviceExperts, num_layers: int = 1) -> Any:
        """The CPU's side of `experts`."""
        from twofold import ops
        from twofold.experts.device_experts import make_host_store

        team = ops.ThreadTeam(0)
        return experts.server(team, make_host_store(team, [self.matrices] * num_layers))


def make_case(
    format: str, hidden: int, intermediate: int, num_experts: int, top_k: int, num_tokens: int
) -> Case:
    """Random, fresh in every call."""
    import numpy as np
    import torch
    from twofold import ops
    from twofold.weight_format import WeightMatrix

    team = ops.ThreadTeam(0)
    rng = np.random.default_rng()

    def matrix(rows: int, columns: int) -> WeightMatrix:
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        if format == "fp8":
            data = torch.from_numpy(values * 16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            grid = np.full((-(-rows // 128), -(-columns // 128)), 1 / 16, np.float32)
            return WeightMatrix(data, format, columns, grid)
        rows_of = np.ascontiguousarray(ops.quantise_rows(team, values, format))
        element = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}.get(format, np.uint8)
        return WeightMatrix(rows_of.view(element), format, columns)

    matrices = [
        (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
        for _ in range(num_experts)
    ]
    dense = [
        tuple(torch.from_numpy(ops.dequantise(team, part)).cuda() for part in expert) for expert in matrices
    ]
    scores = torch.randn(num_tokens, num_experts, device="cuda")
    weights, ids = scores.softmax(1).topk(top_k, dim=1)
    normed = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    return Case(
        format, top_k, matrices, dense, normed, ids.int().contiguous(), weights.contiguous(),
        torch.randn(num_tokens, hidden, device="cuda"),
    )  # type: ignore[arg-type]  # fmt: skip


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖; NaN stays NaN."""
    difference = (ours.double() - reference.double()).norm()
    return float(difference / reference.double().norm())


def hybrid_error(case: Case, kind: str, graph: bool, num_layers: int = 3) -> float:
    """Error of a step of several layers with half of the experts on the CPU. Raises where two runs differ."""
    import torch

    experts = case.device_experts(len(case.matrices) // 2, kind, num_layers=num_layers)
    server = case.server(experts, num_layers)
    hidden = case.residual.clone()

    def step() -> None:
        experts.begin_step()
        for layer in range(num_layers):
            experts.forward(layer, case.normed, case.ids, case.weights, hidden)

    replay = step
    if graph:
        experts.posting(False)
        step()
        experts.posting(True)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        replay = captured.replay
    number = int(experts.step.item())
    results = []
    for _ in range(2):
        hidden.copy_(case.residual)
        replay()
        number += 1
        served = server.serve(number, 5.0)
        if not served["done"]:
            raise AssertionError(served["text"])
        torch.cuda.synchronize()
        results.append(hidden.clone())
    if not torch.equal(*results):
        raise AssertionError("two runs of the same step differ")
    return relative_error(results[0], case.reference(num_layers))


def error_after_a_lost_step(case: Case, watchdog_s: float) -> float:
    """A step is launched and not served; the error of the one after it."""
    import torch

    experts = case.device_experts(0, "kernels", watchdog_s)
    hidden = case.residual.clone()
    experts.begin_step()
    experts.forward(0, case.normed, case.ids, case.weights, hidden)
    torch.cuda.synchronize()  # ends by the device's own limit
    experts.mailbox.abort()
    experts.mailbox.reset()
    hidden.copy_(case.residual)
    experts.begin_step()
    experts.forward(0, case.normed, case.ids, case.weights, hidden)
    served = case.server(experts).serve(2, 5.0)
    if not served["done"]:
        raise AssertionError(served["text"])
    torch.cuda.synchronize()
    return relative_error(hidden, case.reference())


def slots_of_all(case: Case, hidden: int, intermediate: int) -> DeviceExperts:
    """All experts of a layer in slots, decode steps of up to 32 tokens."""
    from twofold.experts.device_experts import DeviceExperts, pack_expert

    packed = [pack_expert(*expert) for expert in case.matrices]
    return DeviceExperts([packed], (case.format, case.format, hidden, intermediate), case.top_k, 32)
