"""The checks that a device passes before a model is served on it.

The short form takes two seconds and stops at the first failure. It needs the model's files, and no memory of the device
beyond one layer. The long form checks every variant of the model's blocks and every handshake, measures bandwidths, and
goes on after a failure.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from twofold.blocks import ops
from twofold.device.backend import HandshakeProbes
from twofold.device.checks.blocks import check_layer, layers_to_check, name_of_layer
from twofold.device.checks.copies import bandwidths, copy_both_ways, upload_experts
from twofold.device.checks.experts import (
    check_format,
    check_served_step,
    expert_pair,
    layers_by_format,
)
from twofold.device.checks.running import (
    LONG,
    SHORT,
    Check,
    CheckResult,
    Figures,
    NotAvailableError,
    run_checks,
)
from twofold.device.device import Device
from twofold.models.model_files import ModelFiles

_log = logging.getLogger(__name__)
_REPORT: Final = "`twofold doctor --gpu MODEL` writes a report to send"


@dataclass(frozen=True)
class SelfCheck:
    """Results of one device, in the order of the checks."""

    device: str
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> CheckResult | None:
        """The first check that failed or is stuck; None: the device may be used."""
        return next((result for result in self.results if result.state in ("failed", "stuck")), None)

    def describe_failure(self) -> str:
        """Which check failed, why, and what to do, in one line; "" if none did."""
        failed = self.failed
        if failed is None:
            return ""
        what = "never returned from" if failed.state == "stuck" else "failed"
        return f"{self.device} {what} the self-check “{failed.name}”: {failed.problem}; {_REPORT}"


def find_fault(
    devices: Sequence[Device], names: Sequence[str], files: ModelFiles, pool: ops.ThreadPool
) -> str:
    """Run the short form on each device: the first one's failure in one line; "" if all may be used."""
    began = time.perf_counter()
    for device, name in zip(devices, names, strict=True):
        found = check_device(device, files, pool, name=name)
        if problem := found.describe_failure():
            return problem
        skipped = [result.name for result in found.results if result.state == "not run"]
        _log.info(
            "%s passed the self-check in %.1f s%s",
            name,
            time.perf_counter() - began,
            f"; not run for lack of time: {', '.join(skipped)}" if skipped else "",
        )
    torch.cuda.empty_cache()  # the plan of the memory comes next
    return ""


def check_device(
    device: Device, files: ModelFiles, pool: ops.ThreadPool, *, name: str, long: bool = False
) -> SelfCheck:
    """Check `device` for a model. Raises nothing that a device causes."""
    checks = _long_checks(device, files, pool) if long else short_checks(device, files, pool)
    return SelfCheck(name, tuple(run_checks(checks, LONG if long else SHORT)))


def short_checks(device: Device, files: ModelFiles, pool: ops.ThreadPool) -> list[Check]:
    """Small things before what stands on them."""
    return [
        Check("copy to the device and back", lambda: copy_both_ways(device)),
        Check("expert uploads", lambda: upload_experts(device, pool)),
        *_served_steps(device, files, pool, ("",)),
        *_formats(device, files, pool),
        *_layers(device, files, pool, every_variant=False),
    ]


def _long_checks(device: Device, files: ModelFiles, pool: ops.ThreadPool) -> list[Check]:
    probe = functools.cache(lambda: device.native.probe_handshakes(files.config.hidden_size))
    return [
        Check("copy to the device and back", lambda: copy_both_ways(device)),
        Check("bandwidths", lambda: bandwidths(device)),
        Check("expert uploads", lambda: upload_experts(device, pool)),
        Check("handshakes", lambda: dict(probe())),
        *_served_steps(device, files, pool, ("kernels", "stream-memory", "host-function"), probe),
        *_formats(device, files, pool),
        *_layers(device, files, pool, every_variant=True),
    ]


def _served_steps(
    device: Device,
    files: ModelFiles,
    pool: ops.ThreadPool,
    kinds: Sequence[str],
    probe: Callable[[], HandshakeProbes] | None = None,
) -> list[Check]:
    """Served steps, eager and as graphs, by handshakes that work by `probe`; None: the kinds are not probed."""
    if not files.config.moe_layers:
        return []
    pair = functools.cache(lambda: expert_pair(files, pool, 0))

    def run(kind: str, graph: bool) -> Figures:
        for probed in [] if probe is None else probe()["probes"]:
            if probed["kind"] == kind and not probed["works"]:
                raise NotAvailableError(probed["why"])
        return check_served_step(device, pool, pair, kind, graph=graph)

    return [
        Check(
            f"{'graph replay' if graph else 'handshake'}{f' by {kind}' if kind else ''}",
            functools.partial(run, kind, graph),
        )
        for graph in (False, True)
        for kind in kinds
    ]


def _formats(device: Device, files: ModelFiles, pool: ops.ThreadPool) -> list[Check]:
    return [
        Check(
            f"experts in {'/'.join(dict.fromkeys(formats))}",
            functools.partial(
                check_format, device, pool, functools.partial(expert_pair, files, pool, layer, formats)
            ),
        )
        for formats, layer in layers_by_format(files).items()
    ]


def _layers(device: Device, files: ModelFiles, pool: ops.ThreadPool, *, every_variant: bool) -> list[Check]:
    return [
        Check(
            name_of_layer(files, layer),
            functools.partial(check_layer, device, pool, files, layer),
        )
        for layer in layers_to_check(files, every_variant=every_variant)
    ]
