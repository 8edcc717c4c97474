"""Records routing, the experts of every token, as compact arrays.

`RoutingRows` gathers token_layer events of one request. `RoutingRecorder` is a telemetry sink that writes those of
every request to one npz file when it is closed. Needs only numpy.

The file (no pickle inside; written atomically):
    ids      uint8 or uint16 [tokens, layers, top_k]   routed experts, descending gate weight
    probs    float16         [tokens, layers, top_k]   gate weights as the layer used them
    offsets  int64           [sequences + 1]           sequence i is rows offsets[i]:offsets[i + 1]
    num_experts int64        []                        experts per layer
    sizes    float64         [5]                       the model's `TraceSizes`
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.api.request_record import RequestRecord
from twofold.api.types import RunInfo
from twofold.api.whole_file import whole_file
from twofold.telemetry.sink import TelemetrySink

Rows = npt.NDArray[Any]
Ids = npt.NDArray[Any]
"""uint8 up to 256 experts, else uint16."""

TokensKept = Literal["answer", "all"]
"""Answers are decoded token by token, as a cache sees them; "all" is for prompts without generation."""


class RoutingRows:
    """Routing of one request, assembled from events that arrive by step and layer."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        self._num_layers = num_layers
        self._top_k = top_k
        self._dtype: type[np.uint8] | type[np.uint16] = np.uint8 if num_experts <= 256 else np.uint16
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def add(self, rows: Rows) -> None:
        """Add token_layer events of this request."""
        self._parts.append(
            (
                rows["position"].copy(),
                rows["layer"].copy(),
                rows["experts"][:, : self._top_k].astype(self._dtype),
                rows["weights"][:, : self._top_k].astype(np.float16),
            )
        )

    def arrays(self, begin: int = 0) -> tuple[Ids, npt.NDArray[np.float16]]:
        """(ids, probs), each [tokens, layers, top_k], by position from `begin` on. Of a token computed twice the last
        computation counts.

        A position with a missing layer (dropped event) ends the request, because later rows would be shifted.
        """
        shape = (0, self._num_layers, self._top_k)
        if not self._parts:
            return np.zeros(shape, self._dtype), np.zeros(shape, np.float16)
        positions, layers, experts, weights = (
            np.concatenate(part) for part in zip(*self._parts, strict=True)
        )
        num_tokens = int(positions.max()) + 1
        ids = np.zeros((num_tokens, *shape[1:]), self._dtype)
        probs = np.zeros((num_tokens, *shape[1:]), np.float16)
        seen = np.zeros((num_tokens, self._num_layers), bool)
        ids[positions, layers] = experts
        probs[positions, layers] = weights
        seen[positions, layers] = True
        complete = seen[begin:].all(axis=1)
        end = num_tokens if complete.all() else begin + int(np.argmin(complete))
        return ids[begin:end], probs[begin:end]


class RoutingRecorder(TelemetrySink):
    """A telemetry sink that keeps the routing of every request and writes it to `path` when closed.

    Raises:
        ConfigError: the directory of `path` does not exist or cannot be written; raised before anything runs.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep: TokensKept = "answer",
        max_events: int = 50_000_000,
        flag: str = "--record-routing",
    ) -> None:
        """Use `path`, given by `flag`. ConfigError naming that flag: not an .npz, or it cannot be written there."""
        self._path = Path(path)
        self._keep = keep
        self._room = max_events
        self._run: RunInfo | None = None
        self._rows: dict[int, RoutingRows] = {}
        self._prompt_tokens: dict[int, int] = {}
        self.num_dropped = 0
        """Events lost: above `max_events`, or dropped before they got here."""
        if self._path.suffix != ".npz":
            raise ConfigError(f"{flag} was given {str(path)!r}; it takes a file name that ends in .npz")
        if not os.access(self._path.parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{flag}: directory {self._path.parent} is missing or not writable; create it or name another"
            )

    def begin_run(self, run: RunInfo) -> None:
        self._run = run

    def request(self, record: RequestRecord) -> None:
        self._prompt_tokens[record.number] = record.prompt_tokens

    def native_events(self, kind: str, rows: Rows) -> None:
        if kind != "token_layer" or self._run is None:
            return
        if len(rows) > self._room:
            self.num_dropped += len(rows)
            return
        self._room -= len(rows)
        for number in np.unique(rows["request"]):
            own = self._rows.get(int(number))
            if own is None:
                own = RoutingRows(self._run.num_layers, self._run.num_experts, self._run.top_k)
                self._rows[int(number)] = own
            own.add(rows[rows["request"] == number])

    def dropped(self, kind: str, count: int) -> None:
        if kind == "token_layer":
            self.num_dropped += count

    def close(self) -> None:
        """Write the whole file atomically; nothing if that fails."""
        if self._run is None:
            return
        ids, probs, offsets = self._sequences()
        arrays: dict[str, Any] = {"ids": ids, "probs": probs, "offsets": offsets}
        arrays["num_experts"] = np.int64(self._run.num_experts)
        if self._run.trace_sizes is not None:
            arrays["sizes"] = np.array(self._run.trace_sizes, np.float64)
        with whole_file(self._path, mode=0o600) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        self._run = None

    def _sequences(self) -> tuple[Ids, Rows, Rows]:
        assert self._run is not None
        empty = RoutingRows(self._run.num_layers, self._run.num_experts, self._run.top_k).arrays()
        parts_ids, parts_probs, lengths = [empty[0]], [empty[1]], [0]
        for number in sorted(self._rows):
            # There are no events for prompt tokens that hit the prefix cache.
            begin = self._prompt_tokens.get(number, 0) if self._keep == "answer" else 0
            ids, probs = self._rows[number].arrays(begin)
            if len(ids) == 0:
                continue
            parts_ids.append(ids)
            parts_probs.append(probs)
            lengths.append(len(ids))
        return np.concatenate(parts_ids), np.concatenate(parts_probs), np.cumsum(lengths, dtype=np.int64)
