"""What a model's own chat template says of its dialects. Nothing is guessed: a template without a dialect's signs has
none."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.chat.dialects import REASONING_PARSERS, TOOL_PARSERS, tokens_of


@dataclass(frozen=True)
class ChatMarks:
    """How one model marks what is not plain text in its answers."""

    tool_call_parser: str | None = None
    """A name of TOOL_PARSERS; None: its template shows no calls in a dialect that is known."""
    reasoning_parser: str | None = None
    """A name of REASONING_PARSERS; None: its template shows no thinking."""
    end_of_turn: tuple[str, ...] = ()
    """Tokens that end its turn, besides what its files call an end."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """The marks around its thinking, where it has such."""
        dialect = REASONING_PARSERS.get(self.reasoning_parser or "")
        return (dialect.begins[0], dialect.ends[0]) if dialect is not None and dialect.begins else None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Marks that the parsers must see, although a vocabulary may have them as special tokens."""
        return tokens_of(self.tool_call_parser, self.reasoning_parser)

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to `prompt` begins inside the thinking: the template has opened it, or the message to be
        continued has."""
        if self.thinking is None:
            return False
        begin, end = (mark.strip() for mark in self.thinking)
        return prompt.rstrip().endswith(begin) or continued.rfind(begin) > continued.rfind(end)


@dataclass(frozen=True)
class FamilyChat:
    """The dialects that a family's publishers use: a model speaks the first whose signs its template has."""

    tools: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    end_of_turn: tuple[str, ...] = ()

    def marks_of(self, template: str | None) -> ChatMarks:
        """Those of a model with this chat template."""
        if template is None:
            return ChatMarks(end_of_turn=self.end_of_turn)
        tool = (name for name in self.tools if all(sign in template for sign in TOOL_PARSERS[name].signs))
        thinking = (
            name for name in self.reasoning if all(sign in template for sign in REASONING_PARSERS[name].signs)
        )
        return ChatMarks(next(tool, None), next(thinking, None), self.end_of_turn)
