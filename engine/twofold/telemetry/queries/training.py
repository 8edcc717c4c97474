"""The steps of a fine-tuning run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
_NAMES = ("step", "at_s", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_s", "memory_bytes")


@dataclass(frozen=True)
class TrainingSteps:
    """Steps of training in order; arrays are [steps], NaN where there is no value."""

    step: F64
    at_s: F64
    loss: F64
    eval_loss: F64
    learning_rate: F64
    grad_norm: F64
    tokens_per_s: F64
    memory_bytes: F64


@dataclass(frozen=True)
class TrainingProgress:
    """State of a run at its latest step."""

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    remaining_s: float
    memory_bytes: int


def training_steps(db: Database, run: Run, *, max_steps: int = 2000) -> TrainingSteps:
    """The steps of a run. Of more than `max_steps` every n-th is read, and all with a held-out loss."""
    table = schema.training_step.c
    own = table.run_id == run.run_id
    ((last,),) = db.rows(select(func.max(table.step)).where(own))
    every = -(-(last or 1) // max_steps)
    chosen = (table.step % every == 0) | table.eval_loss.is_not(None)
    query = select(*(table[name] for name in _NAMES)).where(own, chosen).order_by(table.step)
    rows = np.array([tuple(row) for row in db.rows(query)], np.float64).reshape(-1, len(_NAMES))
    return TrainingSteps(*(np.ascontiguousarray(column) for column in rows.T))


def training_progress(db: Database, run: Run) -> TrainingProgress | None:
    """The latest step; None before the first one."""
    table = schema.training_step.c
    names = [field.name for field in fields(TrainingProgress)]
    query = select(*(table[name] for name in names)).where(table.run_id == run.run_id)
    rows = db.rows(query.order_by(table.step.desc()).limit(1))
    return TrainingProgress(**rows[0]._mapping) if rows else None


def training_load(db: Database, run: Run, *, max_steps: int = 200) -> I64:
    """Tokens routed to each expert in the last `max_steps` steps, [MoE layers, experts]."""
    table = schema.training_step.c
    query = select(table.expert_load).where(table.run_id == run.run_id)
    total = np.zeros((run.num_layers, run.num_experts), np.int64)
    for (blob,) in db.rows(query.order_by(table.step.desc()).limit(max_steps)):
        found = np.frombuffer(zlib.decompress(blob), "<u4") if blob else total[:0]
        if found.size == total.size:
            total += found.reshape(total.shape)
    return total
