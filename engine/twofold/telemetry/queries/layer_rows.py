"""Latest token_layer events of a window as arrays: the material of the cache, scheduler and lab pages.

All other queries of these pages compute from `LayerRows` and `CopyRows` with numpy alone. The number of rows read is
bounded, so the queries cost the same for a run of an hour and of a day.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import select

from twofold.telemetry import schema
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run, Window
from twofold.telemetry.sink import Placement

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MAX_ROWS: Final = 100_000
"""Most token_layer events that are read: 2,083 tokens of 48 layers."""
_MAX_STEPS: Final = 50_000
_NO_EXPERT: Final = -1


@dataclass(frozen=True)
class StepRows:
    """Steps of a window in order; arrays are [steps]."""

    step: I64
    started_s: F64
    num_tokens: I64
    is_decode: npt.NDArray[np.bool_]
    """Steps without prompt tokens."""
    step_us: F64
    """On the run's clock."""
    wall_us: F64
    begin_us: F64
    """On the run's clock since its start; NaN if not recorded."""

    def __len__(self) -> int:
        return len(self.step)

    def part(self, chosen: slice) -> StepRows:
        return StepRows(*(getattr(self, name)[chosen] for name in StepRows.__annotations__))

    def since(self, step: int) -> StepRows:
        """The steps from `step` on."""
        return self.part(slice(int(np.searchsorted(self.step, step)), None))


def step_rows(db: Database, run: Run, span: Window, *, limit: int = _MAX_STEPS) -> StepRows:
    """The latest `limit` steps that began in the window."""
    table = schema.step.c
    query = (
        select(
            table.step,
            table.started_s,
            table.num_prefill_tokens,
            table.num_decode_tokens,
            table.step_us,
            table.wall_us,
            table.begin_us,
        )
        .where(table.run_id == run.run_id)
        .where(table.started_s >= float(span.begin_s), table.started_s < float(span.end_s))
        .order_by(table.started_s.desc())
        .limit(limit)
    )
    found = np.array([tuple(row) for row in db.rows(query)], np.float64).reshape(-1, 7)
    found = found[np.argsort(found[:, 0], kind="stable")]
    step, started_s, prefill, decode, step_us, wall_us, begin_us = found.T
    return StepRows(
        step.astype(np.int64),
        started_s,
        (prefill + decode).astype(np.int64),
        prefill == 0,
        step_us,
        wall_us,
        begin_us,
    )


@dataclass(frozen=True)
class LayerRows:
    """Events by step, layer, request and position, each of one token in one layer; arrays are [rows] or [rows, top_k].

    Entries of `experts` beyond the experts of a token are -1; their placements are meaningless.
    """

    num_layers: int
    num_experts: int
    steps: StepRows
    """The steps whose rows these are."""
    step: I64
    request: I64
    position: I64
    layer: I64
    layer_us: F64
    cpu_us: F64
    gpu_us: F64
    predicted_us: F64
    experts: npt.NDArray[np.int32]
    placement: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.step)

    def halves(self, max_tokens: int | None = None) -> tuple[LayerRows, LayerRows]:
        """The rows of the first and of the second half of the steps.

        max_tokens: the second part has at most so many tokens, the first at most four times as many.
        """
        begin, middle = 0, len(self.steps) // 2
        if max_tokens is not None and len(self.steps):
            from_end = np.cumsum(self.steps.num_tokens[::-1])
            middle = max(
                middle, len(self.steps) - max(1, int(np.searchsorted(from_end, max_tokens, "right")))
            )
            begin = len(self.steps) - int(np.searchsorted(from_end, 5 * max_tokens, "right"))
        return self._steps(begin, middle), self._steps(middle, len(self.steps))

    def latest(self, num_steps: int) -> LayerRows:
        """The rows of the last `num_steps` steps."""
        return self._steps(max(0, len(self.steps) - num_steps), len(self.steps))

    def _steps(self, first: int, last: int) -> LayerRows:
        """The rows of steps [first, last), counted within these rows."""
        bounds = [int(self.steps.step[at]) if at < len(self.steps) else np.inf for at in (first, last)]
        rows = np.searchsorted(self.step, bounds)
        return self._part(slice(int(rows[0]), int(rows[1])), slice(first, last))

    def _part(self, rows: slice, steps: slice) -> LayerRows:
        names = list(LayerRows.__annotations__)[3:]
        kept = self.steps.part(steps)
        return LayerRows(self.num_layers, self.num_experts, kept, *(getattr(self, n)[rows] for n in names))

    @cached_property
    def layers(self) -> StepLayers:
        """One entry per step and layer, whatever the step's number of tokens."""
        return _step_layers(self)


@dataclass(frozen=True)
class StepLayers:
    """Layers of steps, ordered by step and layer; arrays are [step layers] or [distinct experts].

    An expert that several tokens of the step chose counts once, as the engine computes it once.
    """

    step: I64
    layer: I64
    is_decode: npt.NDArray[np.bool_]
    layer_us: F64
    cpu_us: F64
    gpu_us: F64
    predicted_us: F64
    num_hits: I64
    """Distinct experts by placement."""
    num_cpu: I64
    num_fetched: I64
    use_step: I64
    """[distinct experts]: step, layer, expert and placement of every distinct use."""
    use_layer: I64
    use_expert: I64
    use_placement: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.step)


def layer_rows(db: Database, run: Run, span: Window, *, max_rows: int = MAX_ROWS) -> LayerRows:
    """Rows of the window's latest steps, as many whole steps as `max_rows` allows (at least one)."""
    steps = step_rows(db, run, span)
    rows_from_end = np.cumsum(steps.num_tokens[::-1]) * max(run.num_layers, 1)
    num_steps = min(max(1, int(np.searchsorted(rows_from_end, max_rows, side="right"))), len(steps))
    kept = steps.part(slice(len(steps) - num_steps, None))
    return _as_arrays(run, kept, _events(db, run, kept))


def _events(db: Database, run: Run, steps: StepRows) -> npt.NDArray[Any]:
    first, last = (int(steps.step[0]), int(steps.step[-1])) if len(steps) else (0, -1)
    found = events(db, run, "token_layer", first_step=first, last_step=last)
    found = found[(found["request"] >= 0) & np.isin(found["step"], steps.step)]
    return found[np.lexsort((found["position"], found["request"], found["layer"], found["step"]))]


def _as_arrays(run: Run, steps: StepRows, found: npt.NDArray[Any]) -> LayerRows:
    width = int(found["num_routed"].max(initial=max(run.top_k, 1)))
    routed = np.arange(width) < found["num_routed"][:, None]
    experts = np.where(routed, found["experts"][:, :width].astype(np.int32), _NO_EXPERT)

    def column(name: str, dtype: type[np.int64] | type[np.float64]) -> npt.NDArray[Any]:
        return found[name].astype(dtype)

    return LayerRows(
        num_layers=max(run.num_layers, int(found["layer"].max(initial=-1)) + 1),
        num_experts=max(run.num_experts, int(experts.max(initial=-1)) + 1),
        steps=steps,
        **{name: column(name, np.int64) for name in ("step", "request", "position", "layer")},
        **{name: column(name, np.float64) for name in ("layer_us", "cpu_us", "gpu_us", "predicted_us")},
        experts=experts,
        placement=found["placement"][:, :width],
        weights=found["weights"][:, :width],
    )


def _step_layers(rows: LayerRows) -> StepLayers:
    pair = rows.step * rows.num_layers + rows.layer
    pairs, first, group = np.unique(pair, return_index=True, return_inverse=True)
    valid = rows.experts >= 0
    cell = (group[:, None] * rows.num_experts + rows.experts)[valid]
    used, at = np.unique(cell, return_index=True)
    place = rows.placement[valid][at]
    of_pair = used // rows.num_experts

    def count(placement: Placement) -> I64:
        return np.bincount(of_pair[place == placement], minlength=len(pairs)).astype(np.int64)

    decode_steps = rows.steps.step[rows.steps.is_decode]
    return StepLayers(
        step=rows.step[first],
        layer=rows.layer[first],
        is_decode=np.isin(rows.step[first], decode_steps),
        **{name: getattr(rows, name)[first] for name in ("layer_us", "cpu_us", "gpu_us", "predicted_us")},
        num_hits=count(Placement.HIT),
        num_cpu=count(Placement.CPU),
        num_fetched=count(Placement.FETCHED),
        use_step=rows.step[first][of_pair],
        use_layer=rows.layer[first][of_pair],
        use_expert=(used % rows.num_experts).astype(np.int64),
        use_placement=place,
    )
