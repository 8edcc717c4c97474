"""The engine: what it is loaded from, how requests become steps, and a step's way through the model.

`Engine` is imported when asked for: schedulers and page pools are of use where the native modules are not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twofold.engine.engine import Engine, EngineStats

__all__ = ["Engine", "EngineStats"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from twofold.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
