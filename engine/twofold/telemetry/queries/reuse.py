"""Routing of a window as sequences of decode tokens, and how soon experts are used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.telemetry.queries.layer_rows import LayerRows
from twofold.telemetry.sink import Placement

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MAX_TOKENS: Final = 2_000
"""Most tokens whose reuse distance is computed."""


@dataclass(frozen=True)
class RecordedRouting:
    """Decode tokens of a window, request by request: what `twofold.tools.lab` replays."""

    ids: npt.NDArray[np.uint16]
    """[tokens, layers, top_k]"""
    weights: npt.NDArray[np.float32]
    offsets: I64
    """[sequences + 1]: sequence i is tokens offsets[i]:offsets[i + 1]."""
    num_experts: int
    batch: int
    """Mean number of tokens per decode step, at least 1."""
    num_hits: int
    """Hits of the engine itself on these tokens; distinct experts per layer and step, as a replay counts."""
    num_uses: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def hit_rate(self) -> float:
        """Hit rate of the engine itself; NaN without tokens."""
        return self.num_hits / self.num_uses if self.num_uses else float("nan")


def recorded_routing(rows: LayerRows) -> RecordedRouting:
    """Tokens of steps without prompt tokens whose layers were all recorded. Prompt tokens are left out: they stream."""
    decode = np.isin(rows.step, rows.steps.step[rows.steps.is_decode]) & (rows.experts >= 0).all(axis=1)
    base = int(rows.position.max(initial=0)) + 1
    token = rows.request * base + rows.position
    tokens, count = np.unique(token[decode], return_counts=True)
    tokens = tokens[count == rows.num_layers]
    chosen = decode & np.isin(token, tokens)
    order = np.flatnonzero(chosen)[np.lexsort((rows.layer[chosen], token[chosen]))]
    shape = (len(tokens), rows.num_layers, rows.experts.shape[1])
    starts = np.flatnonzero(np.diff(tokens // base, prepend=-2))
    layers = rows.layers
    used = np.isin(layers.use_step, np.unique(rows.step[chosen]))
    per_step = rows.steps.num_tokens[rows.steps.is_decode]
    return RecordedRouting(
        ids=rows.experts[order].reshape(shape).astype(np.uint16),
        weights=rows.weights[order].reshape(shape),
        offsets=np.append(starts, len(tokens)).astype(np.int64),
        num_experts=rows.num_experts,
        batch=max(1, round(float(per_step.mean()))) if len(per_step) else 1,
        num_hits=int((used & (layers.use_placement == Placement.HIT)).sum()),
        num_uses=int(used.sum()),
    )


@dataclass(frozen=True)
class RecordedSteps:
    """Tokens of steps in the order of the steps, prompt tokens included: what `twofold.tools.lab.run_replay` plays."""

    step: I64
    """[steps] numbers of the steps."""
    begins: I64
    """[steps + 1]: step i is tokens begins[i]:begins[i + 1]."""
    decodes: npt.NDArray[np.uint8]
    """[steps]: 1 without prompt tokens."""
    ids: npt.NDArray[np.uint16]
    """[tokens, layers, top_k]"""
    weights: npt.NDArray[np.float32]
    requests: I64
    """[tokens]"""
    positions: npt.NDArray[np.int32]
    """[tokens]"""
    num_experts: int
    num_lost: int
    """Tokens left out because rows of them are missing."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def recorded_steps(rows: LayerRows) -> RecordedSteps:
    """The tokens whose layers were all recorded, by step, request and position."""
    order = np.lexsort((rows.layer, rows.position, rows.request, rows.step))
    key = np.stack([rows.step, rows.request, rows.position])[:, order]
    begins = np.flatnonzero(np.any(np.diff(key, prepend=-1), axis=0))
    routed = np.asarray((rows.experts >= 0).all(axis=1), np.int64)[order]
    complete: I64 = np.add.reduceat(routed, begins) if len(begins) else begins
    whole = np.asarray(complete == rows.num_layers, np.bool_)
    chosen = order[(begins[whole][:, None] + np.arange(rows.num_layers)).ravel()]
    step, requests, positions = key[:, begins[whole]]
    found, first = np.unique(step, return_index=True)
    shape = (len(step), rows.num_layers, rows.experts.shape[1])
    return RecordedSteps(
        step=found,
        begins=np.append(first, len(step)).astype(np.int64),
        decodes=np.isin(found, rows.steps.step[rows.steps.is_decode]).astype(np.uint8),
        ids=rows.experts[chosen].reshape(shape).astype(np.uint16),
        weights=rows.weights[chosen].reshape(shape),
        requests=requests,
        positions=positions.astype(np.int32),
        num_experts=rows.num_experts,
        num_lost=int((~whole).sum()),
    )


def stack_distances(routing: RecordedRouting, *, max_tokens: int = MAX_TOKENS) -> I64:
    """Uses by stack distance: entry d counts uses whose layer used d other experts since that expert's last use.

    An LRU cache with more than d slots per layer hits exactly these uses. The last entry, num_experts, counts first
    uses. Tokens are taken in the recorded order; [num_experts + 1].
    """
    ids = routing.ids[-max_tokens:].astype(np.int64)
    _, num_layers, top_k = ids.shape
    by_weight = np.arange(top_k)[::-1]  # within a token the heaviest expert counts as the latest
    last = np.full((num_layers, routing.num_experts), -1, np.int64)
    counts = np.zeros(routing.num_experts + 1, np.int64)
    at_layer = np.arange(num_layers)[:, None]
    for token, chosen in enumerate(ids):
        before = last[at_layer, chosen]
        newer = (last[:, None, :] > before[:, :, None]).sum(axis=2)
        counts += np.bincount(np.where(before < 0, routing.num_experts, newer).ravel(), minlength=len(counts))
        last[at_layer, chosen] = token * top_k + by_weight
    return counts


def lru_hit_rate(counts: I64) -> F64:
    """Hit rate of an LRU cache with 0, 1, … num_experts slots per layer, from `stack_distances`."""
    total = max(1, int(counts.sum()))
    return np.concatenate([[0.0], np.cumsum(counts[:-1]) / total])
