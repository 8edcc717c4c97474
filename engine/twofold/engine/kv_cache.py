"""Which pages of the KV cache belong to whom. The memory itself is native (`ops.StateCache`).

A page holds `page_size` tokens of every layer. Ask (`can_append`) before doing (`append`); nothing here raises in
normal running.
"""

from __future__ import annotations


class PagePool:
    """A free list of page numbers 0 … num_pages-1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

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
