"""`twofold calibrate`: measure this machine's CPU and GPU on a model's experts and store the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.api.errors import ConfigError
from twofold.api.whole_file import whole_file
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.hub.model_path import MODEL_NAME_HELP, model_path
from twofold.tools.cli.number_options import add_options, cpu_threads_option, whole

if TYPE_CHECKING:
    from twofold.device.calibration import DeviceCalibration
    from twofold.device.device import Device
    from twofold.experts.calibration import Calibration
    from twofold.experts.profiles import MachineProfile

_BAR_CHARS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help=f"model whose experts are measured: a path, {MODEL_NAME_HELP} (default: the bundled one)",
    )
    parser.add_argument(
        "--base",
        default="rtx4090-pcie4",
        help="profile whose accelerator figures are used if no GPU is measured",
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cuda", "none"),
        default="auto",
        help="measure the GPU: auto (if there is one), cuda (fail without one), none (default: auto)",
    )
    parser.add_argument(
        "--devices", metavar="cuda:N", help="GPU to measure, one of several (default: the first)"
    )
    parser.add_argument(
        "--output", metavar="FILE.json", help="file for the profile (default: in this user's settings)"
    )
    repeats = "most measurements of each figure"
    add_options(parser, [cpu_threads_option(), ("--repeats", "N", whole(1, 1000), 15, repeats)])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store. ConfigError when the profile cannot be written; the write is atomic."""
    from twofold.blocks import ops
    from twofold.experts.calibration import LayerTimer, calibrate, to_profile
    from twofold.experts.profiles import load_profile, local_profile_path
    from twofold.models.bundled import bundled_model_path
    from twofold.models.model_files import open_model_files
    from twofold.step.expert_loading import moe_shape

    base = load_profile(args.base)
    requested = _requested_devices(args.accelerator, args.devices)
    measured_device, why_none = _measured_device(args.accelerator, requested)
    files = open_model_files(model_path(args.model) if args.model else bundled_model_path())
    shape = moe_shape(files).of_text
    output = Path(args.output) if args.output else local_profile_path()
    timer = LayerTimer(shape, ops.ThreadPool(args.cpu_threads))
    device: DeviceCalibration | None = None
    with Bar("calibrating", "", 1.0) as bar:

        def show(what: str, share: float) -> None:
            bar.show(round(100 * share), 100, what)

        calibration = calibrate(shape, args.cpu_threads, repeats=args.repeats, progress=show, timer=timer)
        if measured_device is not None:
            from twofold.device.calibration import calibrate_device
            from twofold.device.probe import KernelProbe

            timer.use(ops.ThreadPool(args.cpu_threads))
            with measured_device.active():
                probe = KernelProbe(measured_device, shape)
                device = calibrate_device(probe, shape, timer, repeats=args.repeats, progress=show)
    measured = device.figures(calibration.curve.layer_us) if device else None
    profile = to_profile(
        calibration, base, measured, _stored(output), device=f"cuda{requested[0]}" if requested else ""
    )
    _write(output, profile.to_json())
    if args.json:
        figures = _figures(calibration) | {"accelerator": device and _device_figures(device)}
        print(json.dumps(figures | {"profile": str(output)}))
    else:
        print(format_calibration(calibration))
        print(
            format_device(device)
            if device is not None
            else f"accelerator not measured ({why_none}): its figures come from {base.name}"
        )
        print(f"stored in {output}; used from now on for predictions on this machine")
    return 0


def format_calibration(calibration: Calibration) -> str:
    """The fit as a table with residuals and a plot, for a terminal."""
    curve = calibration.curve
    lines = [
        f"CPU experts, {curve.format}, {curve.hidden} x {curve.intermediate}, {curve.threads} threads; "
        f"a layer costs {curve.layer_us:.1f} us beside its experts",
        f"{'tokens':>7} {'us/expert':>10} {'GFLOP/s':>8} {'residual':>9}",
    ]
    longest = max(us for _, us in curve.points)
    flops = 6.0 * curve.hidden * curve.intermediate
    for tokens, us in curve.points:
        residuals = [s.error for s in calibration.grid if s.loads[0] == tokens]
        bar = "#" * max(1, round(_BAR_CHARS * us / longest))
        lines.append(
            f"{tokens:>7} {us:>10.2f} {flops * tokens / us / 1e3:>8.1f} {max(residuals):>8.1%}  {bar}"
        )
    threads = ", ".join(f"{count}: {us:.1f} us" for count, us in calibration.thread_us.items())
    lines += [
        f"a decode layer by threads: {threads}",
        f"slow-down while {calibration.copy_gbps:.1f} GB/s are copied beside it: {calibration.contention:.1%}",
        f"error on {len(calibration.unseen)} layers of mixed loads that were not fitted: median "
        f"{calibration.median_error:.1%}, worst {max(s.error for s in calibration.unseen):.1%}",
    ]
    return "\n".join(lines)


def format_device(device: DeviceCalibration) -> str:
    """The fits of link and accelerator with residuals, for a terminal."""
    lines = [
        f"{device.name}, link: an upload takes {device.link_latency_us:.1f} us + its bytes at "
        f"{device.link_bandwidth_gbps:.1f} GB/s",
        f"{'bytes':>11} {'us':>10} {'GB/s':>8} {'residual':>9}",
        *(
            f"{s.num_bytes:>11} {s.measured_us:>10.1f} {s.num_bytes / s.measured_us / 1e3:>8.2f} {s.error:>8.1%}"
            for s in device.link
        ),
        f"{device.name}, experts: a layer takes {device.gpu_launch_us:.1f} us, each expert its "
        f"{device.expert_bytes} bytes at {device.vram_bandwidth_gbps:.0f} GB/s or its arithmetic at "
        f"{device.gpu_gflops:.0f} GFLOP/s",
        f"{'experts':>8} {'tokens each':>12} {'us':>10} {'residual':>9}",
    ]
    lines += [
        f"{len(s.loads):>8} {max(s.loads):>12} {s.measured_us:>10.1f} {s.error:>8.1%}" for s in device.layers
    ]
    lines += [
        f"error on {len(device.unseen)} layers of mixed loads that were not fitted: median "
        f"{device.median_error:.1%}, worst {max(s.error for s in device.unseen):.1%}",
        f"handshake to the CPU and back {device.handshake_us:.2f} us, join {device.join_us:.2f} us",
        f"slow-down of the CPU's decode layers beside uploads of {device.copy_gbps:.1f} GB/s: "
        f"{device.contention:.1%}",
    ]
    return "\n".join(lines)


def _requested_devices(accelerator: str, devices: str | None) -> tuple[int, ...]:
    """Index of the requested GPU; empty: the first one. ConfigError for several, or none with --accelerator none."""
    from twofold.api.config import EngineConfig
    from twofold.device.finding import cuda_indices

    indices = cuda_indices(EngineConfig(accelerator=accelerator, devices=devices))
    if len(indices) > 1:
        raise ConfigError(
            f"--devices was given {devices}; one GPU is measured at a time. Give each its own --output, then all to "
            "twofold serve --machine-profile FIRST.json+SECOND.json"
        )
    return indices


def _measured_device(accelerator: str, indices: Sequence[int]) -> tuple[Device | None, str]:
    """(device to measure, ""), or (None, the reason). ConfigError if a device was requested and is not usable."""
    from twofold.device.finding import find_device

    if accelerator == "none":
        return None, "--accelerator none"
    device, why = find_device(*indices)
    if device is None and indices:
        raise ConfigError(f"--devices cuda:{indices[0]}: {why}")
    if device is None and accelerator == "cuda":
        raise ConfigError(f"--accelerator cuda: {why}; use auto or none")
    return device, why


def _device_figures(device: DeviceCalibration) -> dict[str, object]:
    names = (
        *("name", "memory_bytes", "expert_bytes", "link_latency_us", "link_bandwidth_gbps", "gpu_launch_us"),
        *(
            "vram_bandwidth_gbps",
            "gpu_gflops",
            "handshake_us",
            "join_us",
            "contention",
            "copy_gbps",
            "median_error",
        ),
    )
    layers = {"layers": _layer_figures(device.layers), "unseen": _layer_figures(device.unseen)}
    link = [
        {"bytes": s.num_bytes, "measured_us": s.measured_us, "predicted_us": s.predicted_us}
        for s in device.link
    ]
    return {name: getattr(device, name) for name in names} | {"link": link} | layers


def _figures(calibration: Calibration) -> dict[str, object]:
    curve = calibration.curve
    return {
        "format": curve.format,
        "hidden": curve.hidden,
        "intermediate": curve.intermediate,
        "threads": curve.threads,
        "layer_us": curve.layer_us,
        "points": [{"tokens": tokens, "us": us} for tokens, us in curve.points],
        "thread_us": {str(count): us for count, us in calibration.thread_us.items()},
        "contention": calibration.contention,
        "copy_gbps": calibration.copy_gbps,
        "median_error": calibration.median_error,
        "unseen": _layer_figures(calibration.unseen),
    }


def _layer_figures(samples: Sequence[Any]) -> list[dict[str, object]]:
    return [
        {"tokens": list(s.loads), "measured_us": s.measured_us, "predicted_us": s.predicted_us}
        for s in samples
    ]


def _stored(path: Path) -> MachineProfile | None:
    """The stored profile of an earlier calibration. None for a file that is not a valid profile: it is replaced."""
    from twofold.experts.profiles import load_profile

    try:
        return load_profile(str(path)) if path.is_file() else None
    except ConfigError as error:
        print(f"{error}; it is replaced", file=sys.stderr)
        return None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written to {path}: {error.strerror}; name another --output"
        ) from error
