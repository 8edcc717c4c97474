"""Reads PostgreSQL's sums of integers as integers, as SQLite returns them."""

from __future__ import annotations

from typing import Any

from psycopg.adapt import Loader
from sqlalchemy import Engine, event


class _NumberLoader(Loader):
    """numeric → int, or float where it has a fraction."""

    def load(self, data: bytes | bytearray | memoryview) -> int | float:
        digits = bytes(data)
        return int(digits) if digits.lstrip(b"-").isdigit() else float(digits)


def register(engine: Engine) -> None:
    """Use the loader on each new connection."""

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        connection.adapters.register_loader("numeric", _NumberLoader)
