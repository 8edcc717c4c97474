"""The devices of a run: slots, experts that each ran, and copies to each, over the whole run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from twofold.telemetry.queries.runs import Database, Run, run_totals
from twofold.telemetry.totals import device_total


@dataclass(frozen=True)
class DeviceUse:
    """What one device did."""

    name: str
    num_slots: int | None
    """Expert slots at the start; None: not recorded."""
    num_runs: int
    """Experts that it ran, counted for each token."""
    num_uploads: int
    upload_bytes: int


def device_uses(db: Database, run: Run) -> list[DeviceUse]:
    """One entry for each device, the first device first; empty without slots."""
    if not run.devices:
        return []
    totals = run_totals(db, run)
    further = range(1, len(run.devices))
    counted = {
        name: [int(totals[device_total(device, name)]) for device in further]
        for name in ("runs", "uploads", "upload_bytes")
    }
    whole = {
        "runs": int(totals["num_hits"] + totals["num_fetched"]),
        "uploads": int(totals["num_uploads"]),
        "upload_bytes": int(totals["upload_bytes"]),
    }
    columns = ([whole[name] - sum(counts), *counts] for name, counts in counted.items())
    slots = json.loads(run.machine_json).get("slots") or [None] * len(run.devices)
    return [DeviceUse(*each) for each in zip(run.devices, slots, *columns, strict=True)]
