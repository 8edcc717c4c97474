"""Do drafted tokens foretell experts, and would uploading these ahead pay? On emulated machines, times are virtual.

    python -m benchmarks.draft_foresight [--text BOOK.txt] [--trace TRACE.npz] [--tokens 1500]

Drafted tokens are known before the step that verifies them, so experts of all its layers could be uploaded ahead, where
the prefetcher otherwise sees one layer ahead. First, how much of a token's routing each source predicts in the bundled
model, by MoE layer:

- `table`: the experts that the same token had when it was last routed; a token's first occurrence predicts nothing.
- `previous`: the experts of the token before.
- `embedding`: the layers' routers on the token's embedding.
- `mtp`: the layers' routers on the hidden state of the model's own prediction layer, one token ahead.

Then `LayerScheduler` with its prefetcher and unchanged price decodes the recorded routing, with 3 drafts per step of
which 0.7 are accepted, and predicts 1, 2 or all later layers before each layer. `right` predicts every routed expert:
the most that any source can gain. `router` is right for 80 %, one layer ahead, as the next layer's router is, which
engines run today. With a trace of gpt-oss-20b, the same at Qwen3-30B-A3B's shape (4.5 bits), where tokens are not
recorded: `half` and `most` predict 50 and 80 % of the routed experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.experts.profiles import load_profile
from twofold.models.bundled import bundled_model_path
from twofold.step.model import BatchMeta
from twofold.step.runner import ModelRunner
from twofold.tools.lab.foresight import played_scheduler
from twofold.tools.lab.shapes import SHAPES, ModelShape, find_shape
from twofold.tools.lab.trace import load_trace, make_trace

from benchmarks.draft_depths import MODEL, composed, first_tokens

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
_TALE: Final = Path(__file__).parents[1] / "engine/twofold/quantise/tale.txt"
_MACHINES: Final = ("rtx3060-pcie3", "rtx4090-pcie4", "h200-pcie5")
_SEQUENCE: Final = 250
_DEPTH: Final = 3
_ACCEPTED: Final = 0.7
_LIKELY: Final = 4.0
"""Logit of a predicted expert; of others, noise around 0."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Routing of a text, and what each source predicts of it; NaN: nothing."""

    shape: ModelShape
    ids: I32
    """[tokens, layers, top_k]"""
    sources: Mapping[str, F32]
    """Logits [tokens, layers, experts]."""


def read_text(engine: Engine, tokens: list[int]) -> tuple[I32, F32]:
    """Routing [tokens, layers, top_k] and the prediction layer's hidden states [tokens, hidden], in sequences."""
    ids, states = [], []
    reading = SamplingParams(max_tokens=1, ignore_eos=True)
    for begin in range(0, len(tokens), _SEQUENCE):
        part = tuple(tokens[begin : begin + _SEQUENCE])
        chunks: list[Chunk] = []
        engine.submit(GenerationRequest(part, reading, chunks.append, "r", return_routed_experts=True))
        while engine.step():
            pass
        routed = chunks[-1].routed_experts
        assert routed is not None, chunks[-1].error
        ids.append(np.asarray(routed)[: len(part)])
        states.append(_predicted_states(engine, part))
    return np.concatenate(ids).astype(np.int32), np.concatenate(states)


def _predicted_states(engine: Engine, tokens: tuple[int, ...]) -> F32:
    """At each position the prediction layer's hidden state that was computed for it from the one before; NaN at the
    first two."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner.predictions is not None
    predictions, model = runner.predictions, runner.predictions._model
    count = len(tokens)
    page_size = engine.config.page_size
    pages = np.arange(-(-count // page_size), dtype=np.int32)[None]

    def batch(length: int) -> BatchMeta:
        return BatchMeta(
            positions=np.arange(length, dtype=np.int32),
            sequence_index=np.zeros(length, np.int32),
            page_tables=pages,
            prompt_lengths=np.array([length], np.int32),
            records=np.zeros(1, np.int32),
        )

    hidden = np.empty((count, model.config.hidden_size), np.float32)
    moe, cache = predictions._moe, predictions._kv_cache
    moe.begin_step(0, [0] * count, list(range(count)), is_recorded=False)
    hidden = model.forward(np.array(tokens, np.int32), batch(count), cache, moe.executor)
    moe.end_step(with_head=False)
    normed = np.empty_like(hidden)
    model.lm_head.norm(hidden, normed)
    moe.begin_step(0, [0] * (count - 1), list(range(count - 1)), is_recorded=False)
    found = predictions._layer.forward(
        np.array(tokens[1:], np.int32),
        np.ascontiguousarray(normed[:-1]),
        model.attention_batch(batch(count - 1)),
        cache,
        moe.executor,
    )
    moe.end_step(with_head=False)
    # Position p predicts token p + 2, so its state stands in for the model's last one at p + 1.
    return np.concatenate([np.full((1, hidden.shape[1]), np.nan, np.float32), found]).astype(np.float32)


def routers(path: Path, num_layers: int) -> tuple[F32, F32, F32]:
    """Embedding, norms [layers, hidden] and gates [layers, experts, hidden] of the bundled model."""
    from safetensors.torch import load_file

    found: dict[str, F32] = {}
    for file in path.glob("*.safetensors"):
        found |= {name: each.float().numpy() for name, each in load_file(file).items()}
    name = "model.layers.{}.{}.weight"
    norms = [found[name.format(layer, "post_attention_layernorm")] for layer in range(num_layers)]
    gates = [found[name.format(layer, "mlp.gate")] for layer in range(num_layers)]
    return (
        found["model.embed_tokens.weight"].astype(np.float32),
        np.stack(norms).astype(np.float32),
        np.stack(gates).astype(np.float32),
    )


def routed_by(states: F32, norms: F32, gates: F32) -> F32:
    """Logits [tokens, layers, experts] of all routers on one hidden state per token."""
    unit = states / np.sqrt((states**2).mean(1, keepdims=True) + 1e-6)
    routed: F32 = np.einsum("td,ld,led->tle", unit, norms, gates, optimize=True).astype(np.float32)
    return routed


def marked(predicted: npt.NDArray[np.integer], num_experts: int) -> F32:
    """Logits [..., experts] that single out the predicted experts [..., k]."""
    logits = np.random.default_rng(0).normal(0, 0.1, (*predicted.shape[:-1], num_experts))
    np.put_along_axis(logits, predicted, _LIKELY, -1)
    return logits.astype(np.float32)


def last_of_same_token(tokens: list[int], ids: I32, num_experts: int) -> F32:
    logits, last = marked(ids, num_experts), dict[int, int]()
    found = np.full_like(logits, np.nan)
    for row, token in enumerate(tokens):
        if token in last:
            found[row] = logits[last[token]]
        last[token] = row
    return found


def previous(logits: F32) -> F32:
    return np.concatenate([np.full_like(logits[:1], np.nan), logits[:-1]])


def partly_right(ids: I32, share: float, num_experts: int) -> F32:
    """Predicts this share of the routed experts, and others instead of the rest."""
    draw = np.random.default_rng(1)
    other = draw.integers(0, num_experts, ids.shape)
    return marked(np.where(draw.random(ids.shape) < share, ids, other), num_experts)


def bundled(text: str, num_tokens: int) -> Recorded:
    path = bundled_model_path()
    engine = Engine.load(
        EngineConfig(
            model=str(path),
            accelerator="none",
            enable_prefix_caching=False,
            speculative_config='{"method": "mtp", "num_speculative_tokens": 1}',
        )
    )
    tokens = engine.tokenizer.encode(text)[:num_tokens]
    ids, states = read_text(engine, tokens)
    num_layers = ids.shape[1]
    num_experts = engine._moe.shape.num_experts
    engine.close()
    embedding, norms, gates = routers(path, num_layers)
    right = marked(ids, num_experts)
    shape = find_shape(str(path), make_trace("bundled", ids, None, None, num_experts))
    sources = {
        "table": last_of_same_token(tokens, ids, num_experts),
        "previous": previous(right),
        "embedding": routed_by(embedding[tokens], norms, gates),
        "mtp": routed_by(states, norms, gates),
        "router": partly_right(ids, 0.8, num_experts),
        "right": right,
    }
    return Recorded(shape, ids, sources)


def large(trace: Path, num_tokens: int) -> Recorded:
    recorded, shape = load_trace(trace), SHAPES[MODEL]
    played = first_tokens(composed(recorded, *shape.routing).part("second"), num_tokens)
    ids = played.ids.astype(np.int32)
    right = marked(ids, played.num_experts)
    sources = {
        "previous": previous(right),
        "half": partly_right(ids, 0.5, played.num_experts),
        "most": partly_right(ids, 0.8, played.num_experts),
        "right": right,
    }
    return Recorded(shape, ids, sources)


def recall(recorded: Recorded, source: str) -> list[float]:
    """By layer, the share of routed experts that are among the source's top-k."""
    logits, ids = recorded.sources[source], recorded.ids
    top_k = ids.shape[2]
    found = []
    for layer in range(ids.shape[1]):
        chosen = np.argsort(-logits[:, layer], axis=1)[:, :top_k]
        there = ~np.isnan(logits[:, layer, :1])
        hits = ((chosen[:, :, None] == ids[:, layer, None, :]).any(1) & there).mean()
        found.append(float(hits))
    return found


@dataclasses.dataclass
class Played:
    tokens_per_s: float
    counts: Any
    """The core's PrefetchCounts; None without prefetch."""


def play(recorded: Recorded, machine: str, slots: float, source: str | None, ahead: int = 1) -> Played:
    """Decode with drafts. source: what predicts; None: no prefetch. ahead: layers that are predicted at a time."""
    ids = recorded.ids
    num_tokens, num_layers, _ = ids.shape
    dense_us = recorded.shape.dense_us(load_profile(machine), num_layers)
    scheduler = played_scheduler(recorded.shape, machine, slots, prefetch=source is not None)
    if source is not None:  # a row without a prediction is noise, which the prefetcher learns to ignore
        noise = np.random.default_rng(2).normal(0, 0.1, recorded.sources[source].shape)
        logits = np.where(np.isnan(recorded.sources[source]), noise, recorded.sources[source])
        logits = logits.astype(np.float32)
    draw, row, begin_us, counted = random.Random(1), 0, 0.0, 0  # noqa: S311
    while row < num_tokens:
        accepted = 0
        while accepted < _DEPTH and draw.random() < _ACCEPTED:
            accepted += 1
        rows = list(range(row, min(row + 1 + accepted, num_tokens)))
        rows += [draw.randrange(num_tokens) for _ in range(1 + _DEPTH - len(rows))]
        if row < num_tokens // 4:  # warm-up
            begin_us, counted = scheduler.now_us, row + 1 + accepted
        scheduler.begin_step()
        for layer in range(num_layers):
            scheduler.advance(dense_us[layer])
            if source is not None:
                for later in range(layer + 1, min(layer + 1 + ahead, num_layers)):
                    scheduler.predict(later, logits[rows, later])
            scheduler.decide(layer, ids[rows, layer])
        scheduler.advance(dense_us[-1])
        row += 1 + accepted
    rate = (num_tokens - counted) / (scheduler.now_us - begin_us) * 1e6
    return Played(rate, None if source is None else scheduler.prefetch_counts)


def print_gains(recorded: Recorded, shares: list[float], names: list[str]) -> None:
    """Gains of 1, 2 and all layers ahead, and the uploads ahead of the last: issued, of which used."""
    print("| machine | slots | off | " + " | ".join(names) + " |")
    print("|" + "---|" * (len(names) + 3))
    every = recorded.ids.shape[1]
    for machine, share in itertools.product(_MACHINES, shares):
        off = play(recorded, machine, share, None).tokens_per_s
        cells = []
        for name in names:
            runs = [
                play(recorded, machine, share, name, ahead)
                for ahead in ((1,) if name == "router" else (1, 2, every))
            ]
            counts = runs[-1].counts
            assert counts is not None
            gains = " ".join(f"{run.tokens_per_s / off - 1:+.1%}" for run in runs)
            cells.append(f"{gains} ({counts.issued}, {counts.used})")
        print(f"| {machine} | {share:.0%} | {off:.1f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=_TALE, help="UTF-8 text that the bundled model reads")
    parser.add_argument("--trace", type=Path, help="recorded routing of 32 experts per layer, top 4")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--slots", type=float, nargs="+", default=[0.25, 0.5])
    args = parser.parse_args()
    small = bundled(args.text.read_text(encoding="utf-8"), args.tokens)
    print(f"bundled model, {len(small.ids)} tokens: recall by MoE layer")
    for name in small.sources:
        if name not in ("router", "right"):
            print(f"{name:10}", " ".join(f"{each:.0%}" for each in recall(small, name)))
    print_gains(small, args.slots, ["table", "mtp", "router", "right"])
    if args.trace is not None:
        wide = large(args.trace, args.tokens // 4)
        print(f"{wide.shape.name}, {len(wide.ids)} tokens")
        print_gains(wide, args.slots, list(wide.sources))


if __name__ == "__main__":
    main()
