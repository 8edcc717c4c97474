"""Memory-mapped files of weights, watched while steps read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from twofold import _core
from twofold.api.errors import WeightsChangedError


class MappedFiles:
    """Mappings that may be in use. One whose weights have all been packed elsewhere is unmapped and left out."""

    def __init__(self, mappings: Iterable[_core.FileMapping]) -> None:
        self._mappings = [weakref.ref(mapping) for mapping in mappings]

    def expect_unchanged(self) -> None:
        """Raises WeightsChangedError if a file was changed: what was computed since may be wrong."""
        if change := self.change():
            raise WeightsChangedError(
                f"{change} while it was served; restart the server with a complete file"
            )

    def change(self) -> str:
        """What happened to a file that was written to or became shorter; empty while none was. 1 us per file."""
        for reference in self._mappings:
            mapping = reference()
            if mapping is not None and (change := mapping.change()):
                return change
        return ""
