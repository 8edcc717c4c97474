"""Latest rows of token_layer in a window as arrays: the material of the cache, scheduler and lab pages.

All other queries of these pages compute from `LayerRows` and `CopyRows` with numpy alone. The number of rows read is
bounded, so the queries cost the same for a run of an hour and of a day.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import or_, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run, Window
from twofold.telemetry.sink import Placement

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MAX_ROWS: Final = 100_000
"""Most rows of token_layer that are read: 2,083 tokens of 48 layers, 0.4 s."""
_MAX_STEPS: Final = 50_000
_NO_EXPERT: Final = -1
_COLUMNS: Final = (
    "step",
    "request",
    "position",
    "layer",
    "num_routed",
    "layer_us",
    "cpu_us",
    "gpu_us",
    "predicted_us",
    "experts",
    "placement",
    "weights",
)


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
        )
        .where(table.run_id == run.run_id)
        .where(table.started_s >= float(span.begin_s), table.started_s < float(span.end_s))
        .order_by(table.started_s.desc())
        .limit(limit)
    )
    found = np.array([tuple(row) for row in db.rows(query)], np.float64).reshape(-1, 6)
    found = found[np.argsort(found[:, 0], kind="stable")]
    step, started_s, prefill, decode, step_us, wall_us = found.T
    return StepRows(
        step.astype(np.int64),
        started_s,
        (prefill + decode).astype(np.int64),
        prefill == 0,
        step_us,
        wall_us,
    )


@dataclass(frozen=True)
class LayerRows:
    """Rows of token_layer, ordered by step, layer and position; arrays are [rows] or [rows, top_k].

    Entries of `experts` beyond those a row routed to are -1; their placements are meaningless.
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

    def halves(self) -> tuple[LayerRows, LayerRows]:
        """The rows of the first and of the second half of the steps."""
        middle = len(self.steps) // 2
        at = int(np.searchsorted(self.step, self.steps.step[middle])) if middle else 0
        return self._part(slice(0, at), slice(0, middle)), self._part(slice(at, None), slice(middle, None))

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
    return _as_arrays(run, kept, _rows_of(db, run, kept) if len(kept) else [])


def _rows_of(db: Database, run: Run, steps: StepRows) -> list[Any]:
    """Rows of these steps, found by the index of requests."""
    table, request = schema.token_layer.c, schema.request.c
    begin_s = float(steps.started_s[0])
    numbers = select(request.number).where(
        request.run_id == run.run_id,
        request.submitted_s <= float(steps.started_s[-1]) + 1.0,
        or_(request.finished_s.is_(None), request.finished_s >= begin_s),
    )
    query = select(*(table[name] for name in _COLUMNS)).where(
        table.run_id == run.run_id,
        table.request.in_(numbers),
        table.step.between(int(steps.step[0]), int(steps.step[-1])),
    )
    return db.rows(query)


def _as_arrays(run: Run, steps: StepRows, rows: list[Any]) -> LayerRows:
    columns: dict[str, Any] = dict.fromkeys(_COLUMNS, ())
    if rows:
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
    step, request, position, layer, routed = (np.array(columns[name], np.int64) for name in _COLUMNS[:5])
    order = np.lexsort((position, layer, step))
    width = int(routed.max(initial=max(run.top_k, 1)))
    experts, placement, weights = (
        _unpacked(columns[name], routed, width, np.dtype(dtype))[order]
        for name, dtype in (("experts", "<u2"), ("placement", "u1"), ("weights", "<f4"))
    )
    experts = experts.astype(np.int32)
    experts[np.arange(width) >= routed[order][:, None]] = _NO_EXPERT
    layer_us, cpu_us, gpu_us, predicted_us = (
        np.array(columns[name], np.float64)[order] for name in _COLUMNS[5:9]
    )
    return LayerRows(
        num_layers=max(run.num_layers, int(layer.max(initial=-1)) + 1),
        num_experts=max(run.num_experts, int(experts.max(initial=-1)) + 1),
        steps=steps,
        step=step[order],
        request=request[order],
        position=position[order],
        layer=layer[order],
        layer_us=layer_us,
        cpu_us=cpu_us,
        gpu_us=gpu_us,
        predicted_us=predicted_us,
        experts=experts,
        placement=placement,
        weights=weights,
    )


def _unpacked(blobs: tuple[bytes, ...], counts: I64, width: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Blobs of counts[i] entries as one array [rows, width], 0 beyond a row's entries."""
    flat = np.frombuffer(b"".join(blobs), dtype)
    if bool((counts == width).all()):
        return flat.reshape(-1, width)
    found = np.zeros((len(counts), width), dtype)
    found[np.arange(width) < counts[:, None]] = flat
    return found


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
