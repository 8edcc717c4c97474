"""What the prefix cache asks of the memory that numbers of pages and records stand for."""

from __future__ import annotations

from typing import Protocol


class StateMemory(Protocol):
    """The memory that numbers of pages and records stand for. Records behind the sequences' are snapshots."""

    def fork_page(self, from_page: int, to_page: int) -> None:
        """All layers' rows of one page become those of another."""

    def fork_record(self, from_record: int, to_record: int) -> None:
        """The same of a record."""

    def read_page(self, page: int) -> bytes:
        """All layers' rows, to be put back later, into any page."""

    def write_page(self, page: int, data: bytes) -> None: ...
    def read_record(self, record: int) -> bytes: ...
    def write_record(self, record: int, data: bytes) -> None: ...
