"""Inputs of layers from tables that a device does not hold: the host reads their rows before each step.

See `blocks.table_inputs.TableInputs.on_host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block_weights import F32
from twofold.blocks.table_inputs import I64, HostInputs, TableInputs
from twofold.models.model_files import ModelFiles
from twofold.step.batch import ids_of, next_ids_of
from twofold.step.sequences import ScheduledSequence


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step's rows, by the ids of its tokens."""

    tables: TableInputs
    host: HostInputs

    @classmethod
    def of_model(cls, files: ModelFiles, pool: ops.ThreadPool) -> StepInputs | None:
        """None: the model has no tables, or devices hold them. Raises ModelLoadError."""
        tables = files.config.embedding.layer_inputs
        if tables is None or not tables.on_host:
            return None
        return cls(tables, tables.cpu(files.embedding, pool))

    @property
    def width(self) -> int:
        return self.tables.width

    def read(self, scheduled: Sequence[ScheduledSequence], *, ahead: bool = False) -> F32:
        """[T, width], a row for each token and draft. Raises KernelError for a row with a NaN or an infinity.

        ahead: also start reading what the next step of the prompts needs.
        """
        if ahead and len(later := next_ids_of(scheduled, self.tables.num_ids)):
            self.host.read_ahead(later)
        ids = ids_of(scheduled, self.tables.num_ids)
        assert ids is not None, "inputs of single tokens"
        return self.of_ids(ids)

    def of_ids(self, ids: I64) -> F32:
        """The same for ids [T, num_ids]."""
        found = np.empty((len(ids), self.width), np.float32)
        self.host.forward(ids, None, found)
        return found
