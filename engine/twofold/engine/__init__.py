"""The engine: what it is loaded from, how requests become steps, and a step's way through the model.

`Engine` is imported when asked for: schedulers and page pools are of use where the native modules are not built.
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
