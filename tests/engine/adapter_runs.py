"""An engine with adapters, and its answers to several requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, LoadedAdapter, SamplingParams
from twofold.engine import Engine
from twofold.experts.spread import RankShare

PROMPT = tuple(range(5, 45))


def engine_of(directory: Path, share: RankShare | None = None, **settings: Any) -> Engine:
    defaults = {"accelerator": "none", "cpu_threads": 2, "max_total_tokens": 1024, "seed": 1}
    return Engine.load(EngineConfig(model=str(directory), **defaults | settings), share=share)


def use(engine: Engine, name: str) -> LoadedAdapter | None:
    """The adapter of this name in memory, which it may leave at any time; None: there is none."""
    try:
        held = engine.adapters.hold(((name, 1.0),))
    except KeyError:
        return None
    engine.adapters.release(held)
    return held


def answers(engine: Engine, names: Sequence[str | None], prompt: tuple[int, ...] = PROMPT) -> list[list[int]]:
    """Tokens of the greedy answers to `prompt`, all asked for at once."""
    found: list[list[int]] = [[] for _ in names]
    for index, (name, tokens) in enumerate(zip(names, found, strict=True)):
        adapter = None if name is None else use(engine, name)
        assert (adapter is None) == (name is None)
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        engine.submit(
            GenerationRequest(
                prompt,
                sampling,
                lambda chunk, tokens=tokens: tokens.extend(chunk.token_ids),  # type: ignore[misc]
                f"{index}-{name}",
                adapter=adapter,
            )
        )
    while engine.step():
        pass
    return found
