"""A run's rows as events of the Trace Event Format, which Perfetto and chrome://tracing display.

Two processes hold the tracks. "wall clock" has steps, their parts and requests. The run's clock has steps, layers,
devices, link lanes and the cache's decisions. It is the same clock in a real-time run. On an emulated accelerator it is
virtual: its process is named "emulated clock", and its times are the cost model's. Both start with the first step.

Recorded are the begin and the duration of steps, requests and uploads. A layer's duration is recorded and its begin is
not: layers follow one another within their step, with the remaining time spread evenly before each. A step's parts are
sums over the step, displayed in the order of their columns. Both tracks are named so.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.types import StepParts
from twofold.telemetry.exports.window import ExportWindow
from twofold.telemetry.sink import CacheEventKind, UploadReason

TraceEvent = dict[str, Any]
Events = npt.NDArray[Any]

WALL: Final = 1
"""Process of the wall clock."""
RUN_CLOCK: Final = 2
"""Process of the run's clock."""
_STEPS, _PARTS = 1, 2
_LAYERS, _CPU, _GPU, _CACHE = 2, 3, 4, 5
_FIRST_LANE: Final = 10
PARTS: Final = [name for name in StepParts._fields if name != "telemetry_us"]
"""Parts of a step between its begin and its end."""
LANES: Final = ("demand", "background")


class Tracks:
    """Slices of a trace, without overlaps on any track: viewers discard a slice that overlaps the one before it.

    Clocks are read apart, so neighbours may overlap by fractions of a microsecond. A slice that begins before the
    previous one of its track ended is cut at its begin.
    """

    def __init__(self) -> None:
        self._ends_us: dict[tuple[int, int], float] = {}

    def slice(
        self, name: str, process: int, track: int, *, begin_us: float, length_us: float, args: dict[str, Any]
    ) -> TraceEvent:
        end_us = begin_us + length_us
        begin_us = max(begin_us, self._ends_us.get((process, track), begin_us))
        end_us = max(begin_us, end_us)
        begin_us, end_us = round(begin_us, 3), round(end_us, 3)
        self._ends_us[process, track] = end_us
        place = {"name": name, "pid": process, "tid": track}
        return {"ph": "X", **place, "ts": begin_us, "dur": round(end_us - begin_us, 3), "args": args}


def track_names(window: ExportWindow) -> Iterator[TraceEvent]:
    """Names of processes and tracks, and their order."""
    run = window.run
    emulated = " (emulated)" if run.emulated else ""
    clock = f"emulated clock: {run.accelerator}, times of the cost model" if run.emulated else "run clock"
    names = {
        WALL: {_STEPS: "steps", _PARTS: "parts of steps (sums, order of columns)"},
        RUN_CLOCK: {
            _STEPS: f"steps{emulated}",
            _LAYERS: f"MoE layers (durations recorded, begins estimated){emulated}",
            _CPU: f"CPU experts{emulated}",
            _GPU: f"GPU experts{emulated}",
            _CACHE: f"expert cache{emulated}",
            **{
                _lane(device, i): f"PCIe lane {i}: {name}{of}{emulated}"
                for device, of in enumerate(_of_devices(run.devices))
                for i, name in enumerate(LANES)
            },
        },
    }
    for process, name in ((WALL, f"wall clock: run {run.run_id}, {run.model}"), (RUN_CLOCK, clock)):
        yield _meta("process_name", process, 0, {"name": name})
        yield _meta("process_sort_index", process, 0, {"sort_index": process})
        for track, track_name in names[process].items():
            yield _meta("thread_name", process, track, {"name": track_name})
            yield _meta("thread_sort_index", process, track, {"sort_index": track})


def _lane(device: int, lane: int) -> int:
    """The track of a lane of a device's link."""
    return _FIRST_LANE + device * len(LANES) + lane


def _of_devices(names: tuple[str, ...]) -> list[str]:
    """Suffixes of the devices' tracks; empty for one device."""
    return [f" of {name}" for name in names] if len(names) > 1 else [""]


def step_events(
    tracks: Tracks, step: Any, *, wall_us: float, clock_us: float | None, emulated: bool
) -> Iterator[TraceEvent]:
    """A row of table `step` on both clocks, and its parts. `wall_us` and `clock_us`: when its tokens were chosen."""
    counts = {
        "step": step.step,
        "prefill_tokens": step.num_prefill_tokens,
        "decode_tokens": step.num_decode_tokens,
        "running": step.num_running,
        "waiting": step.num_waiting,
    }
    name = "prefill" if step.num_prefill_tokens else "decode"
    begin_us = wall_us - step.schedule_us
    # wall_us includes the recording of the previous step, which ended before this one began.
    length_us = step.wall_us - step.telemetry_us
    yield tracks.slice(name, WALL, _STEPS, begin_us=begin_us, length_us=length_us, args=counts)
    if clock_us is not None and emulated:
        yield tracks.slice(name, RUN_CLOCK, _STEPS, begin_us=clock_us, length_us=step.step_us, args=counts)
    elif clock_us is not None:
        clock_begin_us = clock_us - step.schedule_us
        yield tracks.slice(name, RUN_CLOCK, _STEPS, begin_us=clock_begin_us, length_us=length_us, args=counts)
    queue = {"running": step.num_running, "waiting": step.num_waiting}
    yield {"ph": "C", "name": "requests", "pid": WALL, "tid": 0, "ts": round(begin_us, 3), "args": queue}
    for part in PARTS:
        part_us = min(getattr(step, part), wall_us - step.schedule_us + length_us - begin_us)
        if part_us > 0:
            yield tracks.slice(
                part.removesuffix("_us"), WALL, _PARTS, begin_us=begin_us, length_us=part_us, args={}
            )
            begin_us += part_us


def layer_events(tracks: Tracks, events: Events, *, begin_us: float, step_us: float) -> Iterator[TraceEvent]:
    """Layers of one step as slices of the layer, CPU and GPU tracks. `events`: its token_layer events."""
    layers, first, num_tokens = np.unique(events["layer"], return_index=True, return_counts=True)
    placed = {
        name: np.bincount(np.searchsorted(layers, events["layer"]), weights=events[name])
        for name in ("num_hits", "num_cpu", "num_fetched")
    }
    gap_us = max(0.0, step_us - float(events["layer_us"][first].sum())) / (len(layers) + 1)
    for index, (layer, row) in enumerate(zip(layers.tolist(), events[first], strict=True)):
        begin_us += gap_us
        args = {
            "layer": layer,
            "tokens": int(num_tokens[index]),
            "predicted_us": round(float(row["predicted_us"]), 3),
            **{name: int(count[index]) for name, count in placed.items()},
        }
        for track, field in ((_LAYERS, "layer_us"), (_CPU, "cpu_us"), (_GPU, "gpu_us")):
            length_us = float(row[field])
            if length_us > 0:
                yield tracks.slice(
                    f"layer {layer}", RUN_CLOCK, track, begin_us=begin_us, length_us=length_us, args=args
                )
        begin_us += float(row["layer_us"])


def upload_events(tracks: Tracks, events: Events, *, origin_us: float) -> Iterator[TraceEvent]:
    """Uploads as slices of their lane. `origin_us`: the run clock's time of the trace's zero."""
    for row in events[np.argsort(events["begin_us"], kind="stable")]:
        begin_us, end_us = float(row["begin_us"]), float(row["end_us"])
        yield tracks.slice(
            f"layer {row['layer']} expert {row['expert']}",
            RUN_CLOCK,
            _lane(int(row["device"]), int(row["lane"])),
            begin_us=begin_us - origin_us,
            length_us=max(0.0, end_us - begin_us),
            args={
                "step": int(row["step"]),
                "bytes": int(row["size_bytes"]),
                "reason": UploadReason(row["reason"]).name.lower(),
                "slot": int(row["slot"]),
                "device": int(row["device"]),
                "queued_us": round(begin_us - float(row["queued_us"]), 3),
            },
        )


def cache_events(events: Events, *, origin_us: float) -> Iterator[TraceEvent]:
    """Decisions of the expert cache as moments of their track."""
    for row in events:
        yield {
            "ph": "i",
            "s": "t",
            "name": f"{CacheEventKind(row['kind']).name.lower()} layer {row['layer']} expert {row['expert']}",
            "pid": RUN_CLOCK,
            "tid": _CACHE,
            "ts": round(float(row["at_us"]) - origin_us, 3),
            "args": {
                "step": int(row["step"]),
                "device": int(row["device"]),
                "victim": int(row["victim"]),
                "value": round(float(row["value"]), 6),
                "victim_value": round(float(row["victim_value"]), 6),
                "price": round(float(row["price"]), 6),
            },
        }


def request_events(request: Any, window: ExportWindow) -> Iterator[TraceEvent]:
    """A row of table `request` as nested wall-clock spans, cut at the window: until the first token, and after."""
    end_s = min(request.finished_s or window.end_s, window.end_s)
    first_s = min(request.first_token_s or end_s, end_s)
    spans = [
        (
            f"request {request.number}",
            request.submitted_s,
            end_s,
            {
                "request_id": request.request_id,
                "endpoint": request.endpoint,
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "completion_tokens": request.completion_tokens,
                "finish_reason": request.finish_reason or "running",
            },
        ),
        ("to first token", request.submitted_s, first_s, {}),
        ("decode", first_s, end_s, {}),
    ]
    for name, begin_s, span_end_s, args in spans:
        begin_us = (max(begin_s, window.begin_s) - window.begin_s) * 1e6
        span_end_us = (span_end_s - window.begin_s) * 1e6
        if span_end_us < begin_us or (name != spans[0][0] and span_end_us <= begin_us):
            continue
        common = {"cat": "request", "id": request.number, "name": name, "pid": WALL, "tid": 0}
        yield {"ph": "b", **common, "ts": round(begin_us, 3), "args": args}
        yield {"ph": "e", **common, "ts": round(span_end_us, 3)}


def by_step(events: Events, steps: Iterable[int]) -> Iterator[Events]:
    """The events of each step in turn; `steps` ascend."""
    order = events[np.argsort(events["step"], kind="stable")]
    for step in steps:
        first, last = np.searchsorted(order["step"], (step, step + 1))
        yield order[first:last]


def _meta(name: str, process: int, track: int, args: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": track, "ts": 0, "args": args}
