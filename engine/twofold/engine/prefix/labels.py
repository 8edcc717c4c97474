"""Labels that a router gave to prompts, each with the cached page that ends the prompt.

A label lives as long as its page. So a replica can publish which prefixes it holds in words that a router understands.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from twofold.step.page_tree import CachedPage, PageTree
from twofold.step.sequences import Sequence

_MAX_LABELS: Final = 8192
"""64 kB of labels of 8 bytes: what a replica publishes at most."""


class PrefixLabels:
    """Labels of the newest finished prompts; used by the engine's thread."""

    def __init__(self, tree: PageTree, page_size: int) -> None:
        self._tree = tree
        self._page_size = page_size
        self._pages: OrderedDict[bytes, CachedPage] = OrderedDict()

    def remember(self, sequence: Sequence) -> None:
        """Note the labels of a sequence with the last full page of its prompt."""
        num_pages = min(sequence.num_prompt_tokens // self._page_size, len(sequence.cached))
        if not num_pages:
            return
        page = sequence.cached[num_pages - 1]
        for label in sequence.request.prefix_labels:
            self._pages[label] = page
            self._pages.move_to_end(label)
        while len(self._pages) > _MAX_LABELS:
            self._pages.popitem(last=False)

    def cached(self) -> list[bytes]:
        """The labels whose pages are still cached."""
        kept = {label: page for label, page in self._pages.items() if self._tree.find(page.digest) is page}
        self._pages = OrderedDict(kept)
        return list(kept)
