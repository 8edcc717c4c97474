"""Which pages and records of the KV cache belong to whom. The memory itself is native (`ops.StateCache`).

A page holds `page_size` tokens of every layer that keeps keys and values; a record is what the other layers keep of a
sequence, however long it is. Ask (`can_append`) before doing (`append`); nothing here raises in
normal running.
"""

from __future__ import annotations


class PagePool:
    """Free lists of page numbers 0 … num_pages-1 and record numbers 0 … num_records-1."""

    def __init__(self, num_pages: int, page_size: int, num_records: int | None = None) -> None:
        """num_records: None for a model whose layers keep none; then everybody's is 0."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_records = num_records or 0
        self._free_records = None if num_records is None else list(range(num_records - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_records(self) -> int:
        return len(self._free_records or ())

    @property
    def has_record(self) -> bool:
        """Whether one more sequence can have a record."""
        return self._free_records is None or bool(self._free_records)

    def take_record(self) -> int:
        """A record for a sequence; what is in it is that of its last owner, a first token starts it anew."""
        return 0 if self._free_records is None else self._free_records.pop()

    def release_record(self, record: int) -> None:
        """Take a sequence's record back."""
        if self._free_records is not None:
            self._free_records.append(record)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_size)

    def can_append(self, pages: list[int], num_tokens: int) -> bool:
        """Whether a sequence that owns `pages` can grow to `num_tokens` tokens."""
        return self.pages_for(num_tokens) - len(pages) <= len(self._free)

    def append(self, pages: list[int], num_tokens: int) -> None:
        """Grow `pages` in place until it holds `num_tokens` tokens."""
        num_new = self.pages_for(num_tokens) - len(pages)
        if num_new > 0:
            pages.extend(reversed(self._free[-num_new:]))
            del self._free[-num_new:]

    def release(self, pages: list[int]) -> None:
        """Take all of a sequence's pages back; `pages` is empty afterwards."""
        self._free.extend(reversed(pages))
        pages.clear()
