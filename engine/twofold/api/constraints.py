"""What an answer must match: the description that crosses borders, and what an engine makes of it.

Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """One grammar, which the answer matches as a whole."""

    kind: ConstraintKind
    text: str
    """A JSON schema as JSON, a regular expression (Rust's syntax, matched whole), a JSON list of texts, a Lark
    grammar."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between JSON's tokens; "" allows none; None: a space or a line break with
    its indentation."""
    frame: str | None = None
    """A Lark grammar of the whole answer, in which the one above is called @answer: what may stand before it and in its
    place, such as thinking and calls of tools."""
    field: str = "constraint"
    """The request's field, for messages."""


class TokenMatcher(Protocol):
    """One answer on its way through its grammar. Owned by the engine's thread."""

    @property
    def ended(self) -> bool:
        """The grammar is complete: the answer ends here."""

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on; nothing of it may be said to match."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """A bit for each token, whether it may come next; the same until one is taken."""

    @property
    def masks_first(self) -> bool:
        """The mask is applied before a token is picked; otherwise only where the token picked may not come."""

    def admits(self, token: int) -> bool:
        """Whether it may come next, if so it is what `take` is told next."""

    def take(self, token: int) -> None:
        """The next token of the answer."""

    def prepare(self) -> None:
        """All answers of the step have taken their tokens: the masks of the next may be computed, while others work."""

    def fail(self, reason: str) -> None:
        """No token can be picked."""


class CompiledConstraint(Protocol):
    """A grammar that an engine has checked and can start any number of times. Thread-safe."""

    def start(self, masks_first: bool = True) -> TokenMatcher: ...
