"""Recordings of routed experts, and the files that hold them: ours, and those that SGLang reads.

A dump of mode stat or stat_approx is `expert_distribution_recorder_TIME.pt` with `logical_count`; of per_pass and
per_token `…_TIME_0.pt` with `records`. Beside each there is an npz with the sums: `gpu_count` is how often an expert
was computed on the GPU, and `hit_count` how often it was there before it was needed. Needs no engine.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.experts.expert_statistics import write_pt, write_statistics
from twofold.experts.routing_record import CPU, HIT, I64

MAX_BYTES: Final = 256 * 1024**2
"""Size limit of the kept passes; beyond it, the oldest are dropped."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ForwardPass:
    """One step: its number, times each expert was routed to, int32 [placements, layers, experts]; in mode per_token
    also the result of `RoutingRecord.take_step`."""

    number: int
    counts: Array
    rows: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        arrays = (array for array in self.rows.values() if isinstance(array, np.ndarray))
        return self.counts.nbytes + sum(array.nbytes for array in arrays)


@dataclass
class Recording:
    """Data recorded since the start of the recording."""

    mode: str
    counts: I64
    """[placements, layers, experts]."""
    max_passes: int
    num_passes: int = 0
    num_tokens: int = 0
    passes: deque[ForwardPass] = field(default_factory=deque)
    num_dropped: int = 0
    """Passes that were counted but are no longer kept."""
    _kept_bytes: int = 0

    def add(self, counts: I64, num_passes: int, num_tokens: int) -> None:
        self.counts += counts
        self.num_passes += num_passes
        self.num_tokens += num_tokens

    def keep(self, each: ForwardPass) -> None:
        """Add a pass; the oldest are dropped if necessary."""
        self.passes.append(each)
        self._kept_bytes += each.num_bytes
        while len(self.passes) > self.max_passes or (self._kept_bytes > MAX_BYTES and len(self.passes) > 1):
            self._kept_bytes -= self.passes.popleft().num_bytes
            self.num_dropped += 1

    def put_before(self, earlier: Recording) -> None:
        """Prepend `earlier`, as if it had been recorded here first."""
        later, self.passes, self._kept_bytes = list(self.passes), deque(), 0
        self.num_dropped += earlier.num_dropped
        self.add(earlier.counts, earlier.num_passes, earlier.num_tokens)
        for each in (*earlier.passes, *later):
            self.keep(each)

    @property
    def routed(self) -> I64:
        """Times routed to [layers, experts]."""
        return np.asarray(self.counts.sum(axis=0))

    @property
    def on_gpu(self) -> I64:
        return np.asarray(self.routed - self.counts[CPU])

    def summary(self) -> dict[str, Any]:
        """Summary for display and JSON: `hit_rate` is the share of routed experts that were already in a slot."""
        routed = int(self.counts.sum())
        return {
            "mode": self.mode,
            "forward_passes": self.num_passes,
            "tokens": self.num_tokens,
            "routed_experts": routed,
            "gpu_experts": int(self.on_gpu.sum()),
            "hit_rate": round(int(self.counts[HIT].sum()) / routed, 6) if routed else None,
            "kept_passes": len(self.passes),
            "dropped_passes": self.num_dropped,
        }


@dataclass(frozen=True)
class RecordedModel:
    """The model whose experts are counted."""

    name: str
    num_experts: int
    moe_layers: tuple[int, ...]
    """Indices of the model's layers with experts."""
    num_layers: int
    """Layers of the model, including those without experts: SGLang counts them all."""


def write_recording(
    directory: Path, recording: Recording, model: RecordedModel, resident: Array | None = None
) -> list[Path]:
    """Write the files of a dump atomically and return their paths.

    Args:
        resident: bool [layers, experts], current slot contents: a further file, as KTransformers' SGLang writes it.

    Raises:
        ConfigError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--expert-distribution-recorder-dir {directory}: cannot be created ({error.strerror}); "
            "name another directory"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--expert-distribution-recorder-dir {directory}: cannot be written; name another directory"
        )
    stamp = f"{time.time():.6f}"
    npz = directory / f"expert_distribution_recorder_{stamp}.npz"
    made: list[Path] = []
    try:
        made.append(npz)
        write_statistics(
            npz,
            recording.routed,
            model=model.name,
            gpu_count=recording.on_gpu[None],
            hit_count=recording.counts[HIT][None],
            layer_ids=np.array(model.moe_layers),
            num_passes=np.array(recording.num_passes),
            num_tokens=np.array(recording.num_tokens),
            num_dropped=np.array(recording.num_dropped),
            mode=np.array(recording.mode),
        )
        if recording.mode in ("per_pass", "per_token"):
            made.append(directory / f"expert_distribution_recorder_{stamp}_0.pt")
            write_pt(made[-1], _records(recording, model))
        else:
            made.append(npz.with_suffix(".pt"))
            write_statistics(
                made[-1], recording.routed, moe_layers=model.moe_layers, num_layers=model.num_layers
            )
        if resident is not None:
            made.append(directory / f"gpu_expert_distribution_{stamp}.pt")
            masks = _among_all_layers(resident, model)
            write_pt(made[-1], {"gpu_expert_masks": masks[None]})
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    return made


def _records(recording: Recording, model: RecordedModel) -> dict[str, Any]:
    """Records under SGLang's names. The tokens themselves are not recorded: no `input_ids`."""
    logical = np.broadcast_to(np.arange(model.num_experts), (model.num_layers, model.num_experts))
    return {
        "records": [
            {
                "forward_pass_id": each.number,
                "rank": 0,
                "gatherer_key": "primary",
                "global_physical_count": _among_all_layers(_summed(each.counts), model),
                "gpu_physical_count": _among_all_layers(_summed(np.delete(each.counts, CPU, axis=0)), model),
                **_token_fields(each, model),
            }
            for each in recording.passes
        ],
        "last_physical_to_logical_map": np.ascontiguousarray(logical),
        "num_dropped": recording.num_dropped,
    }


def _token_fields(each: ForwardPass, model: RecordedModel) -> dict[str, Any]:
    if not each.rows:
        return {}
    return {
        "requests": each.rows["requests"].tolist(),
        "positions": each.rows["positions"].tolist(),
        "topk_ids_of_layer": _among_all_layers(each.rows["experts"].astype(np.int32), model, -1),
        "placement_of_layer": _among_all_layers(each.rows["placement"], model),
        "misc_objects": [],
    }


def _summed(counts: Array) -> Array:
    return np.asarray(counts.sum(axis=0, dtype=np.int32))


def _among_all_layers(rows: Array, model: RecordedModel, fill: int = 0) -> Array:
    """`rows` [MoE layers, ...] placed among all of the model's layers, `fill` elsewhere."""
    every = np.full((model.num_layers, *rows.shape[1:]), fill, rows.dtype)
    every[list(model.moe_layers)] = rows
    return every
