"""Reads recorded routing from npz files and checks it in full before use.

Format (arrays of one npz, never pickled):
    ids      integer [tokens, layers, top_k]   routed experts, descending gate weight, decode tokens
    probs    float   [tokens, layers, top_k]   gate weights; optional
    offsets  integer [sequences + 1]           sequence i is rows offsets[i]:offsets[i + 1]; optional: one sequence
    num_experts integer []                     optional: the largest id + 1 is taken otherwise
    sizes   float   [5]                        optional: the model's `TraceSizes`
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.types import TraceSizes
from twofold.experts.npz_file import read_arrays

Part = Literal["first", "second", "all"]


@dataclass(frozen=True)
class Trace:
    """Routing of whole sequences. `native` is the checked view that the core replays."""

    name: str
    ids: NDArray[np.uint16]
    """[tokens, layers, top_k]"""
    probs: NDArray[np.float32] | None
    offsets: NDArray[np.int64]
    """[sequences + 1]"""
    num_experts: int
    native: Any
    sizes: TraceSizes | None = None
    """The model's sizes; None: not in the file."""

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    def usage(self) -> list[float]:
        """How often each expert was routed, flat [layers * experts]."""
        counts = [
            np.bincount(self.ids[:, layer].ravel(), minlength=self.num_experts)
            for layer in range(self.num_layers)
        ]
        return [float(n) for n in np.concatenate(counts)]

    def part(self, which: Part) -> Trace:
        """The first or second half of the sequences, never cutting one. A single sequence is in every part."""
        half = self.num_sequences // 2
        if which == "all" or half == 0:
            return self
        first, last = (0, half) if which == "first" else (half, self.num_sequences)
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        probs = None if self.probs is None else self.probs[begin:end]
        offsets = self.offsets[first : last + 1] - begin
        part = make_trace(self.name, self.ids[begin:end], probs, offsets, num_experts=self.num_experts)
        return dataclasses.replace(part, sizes=self.sizes)


def make_trace(
    name: str,
    ids: NDArray[Any],
    probs: NDArray[Any] | None,
    offsets: NDArray[Any] | None,
    num_experts: int | None = None,
) -> Trace:
    """Check arrays and make a trace of them. ConfigError with the actual and expected form."""

    def fail(what: str) -> ConfigError:
        return ConfigError(f"trace {name}: {what}")

    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise fail(
            f"'ids' is {ids.dtype} of shape {ids.shape}; expected integers of shape (tokens, layers, top_k)"
        )
    if ids.size == 0:
        raise fail(f"'ids' is empty (shape {ids.shape}); expected at least one token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > 65534:
        raise fail(f"'ids' holds {low if low < 0 else high}; expected expert numbers 0 … 65534")
    experts = high + 1 if num_experts is None else num_experts
    if high >= experts:
        raise fail(f"'ids' holds expert {high}, but there are {experts} experts (0 … {experts - 1})")
    if probs is not None:
        if probs.shape != ids.shape or not np.issubdtype(probs.dtype, np.floating):
            raise fail(
                f"'probs' is {probs.dtype} of shape {probs.shape}; expected floats of the shape of 'ids' "
                f"{ids.shape}"
            )
        if not np.isfinite(probs).all():
            raise fail("'probs' holds a NaN or an infinity; record it again")
    if offsets is None:
        offsets = np.array([0, ids.shape[0]])
    if offsets.ndim != 1 or len(offsets) < 2 or not np.issubdtype(offsets.dtype, np.integer):
        raise fail(
            f"'offsets' is {offsets.dtype} of shape {offsets.shape}; expected integers (sequences + 1,)"
        )
    flat_ids = np.ascontiguousarray(ids, dtype=np.uint16)
    weights = None if probs is None else np.ascontiguousarray(probs, dtype=np.float32)
    bounds = np.ascontiguousarray(offsets, dtype=np.int64)
    try:
        native = _core.RoutingTrace(flat_ids, weights, bounds, experts)
    except ValueError as error:
        raise fail(str(error).removeprefix("routing trace: ")) from error
    return Trace(name, flat_ids, weights, bounds, experts, native)


def load_trace(path: str | Path, num_experts: int | None = None) -> Trace:
    """Read a trace. `num_experts` overrides the file's number.

    Raises:
        ConfigError: missing, truncated or foreign file, or arrays that contradict each other.
    """
    path = Path(path)
    expected = "expected an npz with 'ids' [tokens, layers, top_k] and 'offsets' [sequences + 1]"
    try:
        arrays = read_arrays(path, ("ids", "probs", "offsets", "num_experts", "sizes"), expected, needs="ids")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {expected}") from error
    if num_experts is None and "num_experts" in arrays:
        if arrays["num_experts"].size != 1 or not np.issubdtype(arrays["num_experts"].dtype, np.integer):
            raise ConfigError(
                f"trace {path}: 'num_experts' is {arrays['num_experts']!r}; expected one integer"
            )
        num_experts = int(arrays["num_experts"].reshape(()))
    trace = make_trace(
        path.stem, arrays["ids"], arrays.get("probs"), arrays.get("offsets"), num_experts=num_experts
    )
    sizes = arrays.get("sizes")
    if sizes is None:
        return trace
    if sizes.shape != (5,) or sizes.dtype.kind != "f" or not (np.isfinite(sizes) & (sizes > 0)).all():
        raise ConfigError(
            f"trace {path}: 'sizes' is {sizes.dtype} of shape {sizes.shape}; expected 5 positive floats"
        )
    return dataclasses.replace(trace, sizes=TraceSizes(*map(float, sizes)))
