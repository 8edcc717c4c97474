"""Token ids of a conversation, and which of them are answers: the loss is computed on these alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import RequestError
from twofold.text.conversation.arranging import arranged
from twofold.text.tokenizer import Tokenizer
from twofold.text.tokenizer.chat_template import ANSWER_MARKS
from twofold.text.tokenizer.literal_text import PromptText

_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\b")
Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """One training sequence."""

    ids: tuple[int, ...]
    is_answer: tuple[bool, ...]
    """Whether the loss counts the token, of each of `ids`."""

    def __len__(self) -> int:
        return len(self.ids)

    def truncated(self, length: int) -> Example:
        return Example(self.ids[:length], self.is_answer[:length])


class AnswerTokens:
    """Turns conversations and texts into `Example`s with a model's tokenizer and chat template."""

    def __init__(self, directory: Path, *, vocab_size: int) -> None:
        """Raises ModelLoadError as `Tokenizer.load`."""
        self.tokenizer = Tokenizer.load(directory, vocab_size=vocab_size)
        self._marking: Tokenizer | None = None
        if _GENERATION.search(self.tokenizer.chat_template or ""):
            self._marking = Tokenizer.load(directory, vocab_size=vocab_size, marks_answers=True)
        end = self.tokenizer.turn_end
        ends = set(self.tokenizer.eos_token_ids)
        self._ends = ends if end is None else ends | {self.tokenizer.token_id(end)}

    def of_text(self, text: str, answer: str = "") -> Example:
        """`text`, then `answer` and the end of the sequence. Without an answer, all of the text is one.

        Raises RequestError if it cannot be encoded.
        """
        whole = self.tokenizer.encode(text + answer, add_special_tokens=True)
        named = self.tokenizer.token_id(self.tokenizer.special_tokens.get("eos_token", ""))
        end = min(self.tokenizer.eos_token_ids, default=None) if named is None else named
        if end is not None and whole[-1:] != [end]:
            whole.append(end)
        begin = _common(self.tokenizer.encode(text, add_special_tokens=True), whole) if answer else 0
        return _example(whole, [(begin, len(whole))])

    def of_conversation(
        self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, skipped: int = 0
    ) -> list[Example]:
        """A conversation as one example, or as several where the template shortens an answer once more follows.

        Args:
            skipped: number of first answers that are part of the prompt.

        Raises:
            RequestError: the model has no chat template, or it refuses the conversation.
        """
        given = arranged([dict(turn) for turn in turns], self.tokenizer)
        if self._marking is not None:
            text, spans = _without_marks(self._render(given, tools, tokenizer=self._marking))
            return [self._of_spans(text, spans[skipped:], trims=False)]
        rendered: list[tuple[PromptText, list[Span]]] = []
        answers = [number for number, turn in enumerate(given) if turn["role"] == "assistant"]
        for number in answers[skipped:]:
            prompt = self._render(given[:number], tools, asks=True)
            text = self._render(given[: number + 1], tools)
            if not text.startswith(prompt):
                raise RequestError(
                    "the chat template does not put an answer after its prompt, so answers cannot be told apart; mark "
                    "them in the template with {% generation %}"
                )
            if rendered and text.startswith(rendered[-1][0]):
                spans = rendered.pop()[1]
            else:
                spans = []
            rendered.append((text, [*spans, (len(prompt), len(text))]))
        return [self._of_spans(text, spans, trims=True) for text, spans in rendered]

    def _render(
        self, turns: list[Any], tools: Any, *, asks: bool = False, tokenizer: Tokenizer | None = None
    ) -> PromptText:
        return (tokenizer or self.tokenizer).apply_chat_template(turns, asks, tools=tools)

    def _of_spans(self, text: PromptText, spans: list[Span], *, trims: bool) -> Example:
        """trims: end an answer with the last token in it that ends a turn; templates write a newline after it."""
        ids = self.tokenizer.encode(text)
        found = []
        for begin, end in spans:
            first, last = (_common(self.tokenizer.encode(_head(text, at)), ids) for at in (begin, end))
            ends = [at for at in range(first, last) if ids[at] in self._ends]
            found.append((first, ends[-1] + 1 if trims and ends else last))
        return _example(ids, found)


def _example(ids: Sequence[int], spans: Sequence[Span]) -> Example:
    is_answer = [False] * len(ids)
    for begin, end in spans:
        is_answer[begin:end] = [True] * (end - begin)
    return Example(tuple(ids), tuple(is_answer))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix. A token across the border of prompt and answer is part of the answer."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _head(text: PromptText, length: int) -> PromptText:
    return PromptText(text[:length], frozenset(at for at in text.literal if at < length))


def _without_marks(marked: PromptText) -> tuple[PromptText, list[Span]]:
    """The text without answer marks, and where answers were."""
    pieces = re.split(f"([{''.join(ANSWER_MARKS)}])", marked)
    text, spans, begin = "", [], 0
    for piece in pieces:
        if piece == ANSWER_MARKS[0]:
            begin = len(text)
        elif piece == ANSWER_MARKS[1]:
            spans.append((begin, len(text)))
        else:
            text += piece
    places = [at for at, character in enumerate(marked) if character in ANSWER_MARKS]
    literal = frozenset(at - sum(place < at for place in places) for at in marked.literal)
    return PromptText(text, literal), spans
