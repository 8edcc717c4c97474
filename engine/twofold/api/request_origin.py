"""How a request reached the engine's process: its trace, and the decision of a fleet's router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

RoutedBy = Literal["", "prefix", "load", "retry"]


@dataclass(frozen=True)
class RequestOrigin:
    """Both are empty for a request that came directly."""

    trace_id: str = ""
    """W3C trace id, 32 hexadecimal digits."""
    routed_by: RoutedBy = ""
    """prefix: the replica was known to have a prefix of the prompt. load: it was the less loaded of two. retry: another
    replica was lost before it answered."""


DIRECT: Final = RequestOrigin()
"""A request without a trace and without a router."""
