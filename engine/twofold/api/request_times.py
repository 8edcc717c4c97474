"""The stopwatch of one request: what each part of its way to the engine took, on the wall clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Part = Literal["read", "parse_wait", "parse", "encode", "tokenise_wait", "template", "tokenise", "compile"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)
"""The parts in order of time: body received; wait for the process that parses large bodies; body parsed and checked;
pictures fetched and encoded; wait for a tokeniser thread; chat template rendered; prompt tokenised; grammar of a
constrained answer compiled."""


@dataclass
class RequestTimes:
    """Wall times of one request before the engine has it, and the moment of its first token at the connection.

    The parts follow one another without gaps: their sum is the time from the request's first byte to its submission.
    One thread at a time holds the request, so no lock is needed.
    """

    received: float
    """When the first byte came, by `time.perf_counter`."""
    received_s: float
    """The same moment as Unix time."""
    submitted: float
    """End of the latest part, by `time.perf_counter`."""
    parts: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds."""
    first_sent_s: float | None = None
    """Unix time at which the first token was handed to the connection."""

    @classmethod
    def begin(cls, waited_s: float = 0.0) -> RequestTimes:
        """Start for a request whose first byte came `waited_s` ago."""
        received = time.perf_counter() - waited_s
        return cls(received, time.time() - waited_s, received)

    def unix_s(self, at: float) -> float:
        """Unix time of a moment by `time.perf_counter`: differences are durations, also where the clock was set."""
        return self.received_s + (at - self.received)

    def mark(self, part: Part) -> None:
        """End `part`, which began where the one before it ended."""
        now = time.perf_counter()
        self.parts[part] += now - self.submitted
        self.submitted = now
