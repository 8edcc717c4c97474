"""Memory operations that the prefix cache needs on pages and records."""

from __future__ import annotations

from typing import Protocol


class StateMemory(Protocol):
    """Memory of numbered pages and records. Records numbered after the sequences' are snapshots."""

    def fork_page(self, from_page: int, to_page: int) -> None:
        """Copy all layers' rows of one page to another."""

    def fork_record(self, from_record: int, to_record: int) -> None:
        """Copy one record to another."""

    def read_page(self, page: int) -> bytes:
        """All layers' rows of a page, to be written later into any page."""

    def write_page(self, page: int, data: bytes) -> None: ...
    def read_record(self, record: int) -> bytes: ...
    def write_record(self, record: int, data: bytes) -> None: ...
