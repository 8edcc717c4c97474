"""Constraints on an answer: the description callers pass in, and the compiled form an engine follows.

Imports no other Twofold module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """One grammar that the whole answer must match."""

    kind: ConstraintKind
    text: str
    """The grammar's source: a JSON schema as JSON, a regular expression (Rust syntax, full match), a JSON list of
    strings, or a Lark grammar."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between JSON tokens. "" allows none. None: a space, or a line break with its
    indentation."""
    frame: str | None = None
    """A Lark grammar of the whole answer that refers to the one above as @answer. It says what may precede the answer
    or replace it, such as thinking and tool calls."""
    field: str = "constraint"
    """The request field it came from, for error messages."""
    parts: tuple[tuple[str, str, str], ...] = ()
    """The schemas that a grammar was made from: request field, tool ("" for none), JSON schema. An error names the one
    that causes it."""


class TokenMatcher(Protocol):
    """Grammar state of one answer. Owned by the engine's thread."""

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete, so that the answer ends here."""

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on. None of it may be reported as matching."""

    @property
    def forced(self) -> int | None:
        """The forced next token, whatever the logits; None: the sampler picks."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """Bit mask of the tokens allowed next; unchanged until a token is taken."""

    @property
    def masks_first(self) -> bool:
        """Whether the mask applies before a token is picked. Otherwise it applies only after a forbidden token was
        picked."""

    def admits(self, token: int) -> bool:
        """Whether `token` is allowed next. If so, the next `take` must be given this token."""

    def take(self, token: int) -> None:
        """Append the answer's next token."""

    def prepare(self) -> None:
        """Start computing the next step's masks in the background; call after all answers of the step took their
        tokens."""

    def fail(self, reason: str) -> None:
        """Mark the answer as failed: no token can be picked."""


class CompiledConstraint(Protocol):
    """A checked grammar that can be started any number of times. Thread-safe."""

    def start(self, masks_first: bool = True) -> TokenMatcher: ...
