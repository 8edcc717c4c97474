"""A run of `twofold finetune` in the telemetry database."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

from twofold import __version__
from twofold.api.config import DatabaseConfig
from twofold.api.types import RunInfo
from twofold.blocks import ops
from twofold.experts.machine_facts import machine_json
from twofold.models.sizing import measure_files, trace_sizes
from twofold.tools.cli.model_options import open_telemetry_database

if TYPE_CHECKING:
    from twofold.telemetry.sink import TelemetrySink
    from twofold.training.finetune.run import FinetuneRun


@contextlib.contextmanager
def recording(config: DatabaseConfig, job: FinetuneRun) -> Iterator[TelemetrySink | None]:
    """A sink in which the run has begun; None without a database. ConfigError if it cannot be written."""
    sink = open_telemetry_database(config)
    if sink is None:
        yield None
        return
    try:
        sink.begin_run(_run_info(job))
        yield sink
    finally:
        sink.close()


def _run_info(job: FinetuneRun) -> RunInfo:
    """The run's description for display and telemetry."""
    files, pool = job.files, ops.ThreadPool(job.config.cpu_threads)
    model = files.config
    return RunInfo(
        kind="training",
        model=str(job.config.model),
        architecture=model.architecture,
        accelerator=job.choice.label,
        accelerator_reason=job.choice.reason,
        clock="wall",
        policy="",
        num_layers=len(model.moe_layers),
        num_experts=model.routed.num_experts,
        top_k=model.routed.top_k,
        num_slots=0,
        expert_bytes=measure_files(files).one_expert_bytes,
        cpu_isa=ops.isa_choice()[0],
        cpu_threads=pool.num_threads,
        version=__version__,
        host=platform.node(),
        config_json=json.dumps(dict(sorted(job.settings.items()))),
        machine_json=machine_json(pool, None, trace_sizes(files)),
    )
