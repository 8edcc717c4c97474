"""The engine: loading, scheduling of requests into steps, and delivery of answers.

`Engine` is imported lazily: schedulers and page pools are usable where the native modules are not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twofold.api.types import EngineStats

if TYPE_CHECKING:
    from twofold.engine.engine import Engine

__all__ = ["Engine", "EngineStats"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from twofold.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
