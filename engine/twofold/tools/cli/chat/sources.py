"""What answers in `twofold chat`: an engine of this process, or a server that runs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Turns = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's format: a content is a text, or a list of texts and pictures."""
Answer = Generator["Piece | Summary", None, None]


class Piece(NamedTuple):
    """A part of an answer as it streams."""

    kind: Literal["reasoning", "content", "note"]
    text: str


@dataclass(frozen=True)
class Summary:
    """The last item of an answer."""

    num_tokens: int = 0
    tokens_per_s: float | None = None
    hit_rate: float | None = None
    """Share of the routed experts that were in VRAM."""
    is_emulated: bool = False
    is_cut: bool = False
    """The longest answer was reached."""

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s{' (emulated)' if self.is_emulated else ''}")
        if self.hit_rate is not None:
            parts.append(f"experts hit {self.hit_rate:.0%}")
        if self.is_cut:
            parts.append("cut at the longest answer")
        return ", ".join(parts)


class Source(Protocol):
    """Answers conversations."""

    @property
    def model(self) -> str: ...

    @property
    def models(self) -> list[str]:
        """Names that `choose` takes."""
        ...

    def choose(self, model: str) -> None:
        """Use another model from now on. ConfigError if there is none of this name."""
        ...

    def answer(self, turns: Turns, sampling: Mapping[str, Any]) -> Answer:
        """The answer to a conversation. Closing the iterator stops it. RequestError, CapacityError, KernelError."""
        ...
