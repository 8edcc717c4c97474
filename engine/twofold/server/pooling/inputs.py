"""Token ids of inputs to pool. Runs on worker threads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from twofold.api.pooling import INSTRUCTION
from twofold.server.bridge.models.prompt_tokens import TooManyTokensError
from twofold.server.bridge.models.protocol import ServingTokenizer
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError
from twofold.server.pooling.schemas import Input

Parts = tuple[list[int], list[int], list[int]]
"""Token ids before the part that may be cut, that part, and those after it."""
_PLACES: Final = re.compile(r"\{(instruction|query|document)\}")
_CHARS_PER_TOKEN: Final = 8
_LONGEST_WORD: Final = 64
"""Tokens at the end of a text that further text may change."""


class InputTokens:
    """Tokenises inputs of one request, each bounded by the context or by the request's own limit."""

    def __init__(self, tokenizer: ServingTokenizer, max_context: int, *, truncated_to: int | None) -> None:
        """truncated_to: most tokens of an input, -1 for the context; None: longer ones are refused, and `tokenizer` is
        bounded."""
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._limit = max_context if truncated_to == -1 else truncated_to

    def encode(self, text: Input, where: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of the input at `where` of the request. ApiError 400 for one that is too long."""
        if not isinstance(text, str):
            return self._checked(text if self._limit is None else text[: self._limit], where)
        text = self._begin(text, self._limit)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TooManyTokensError:
            raise self._too_long(f"more than {self._max_context}", where) from None
        if not ids:
            raise ApiError(400, f"{where}: the input has no tokens; give some text", param=where)
        excess = 0 if self._limit is None else len(ids) - self._limit
        if excess > 0:
            ids = _without_middle(ids, self._tokenizer.encode(text), excess)
        return self._checked(ids, where)

    def pair(
        self, query: str, document: str, where: str, *, prompt: str, instruction: str | None
    ) -> tuple[int, ...]:
        """Token ids of a query and a document; control tokens in them are text. prompt: `ModelPooling.pair_prompt`."""
        values = {"instruction": instruction or INSTRUCTION, "query": query, "document": document}
        try:
            before, ids, after = self._in_prompt(prompt, values) if prompt else self._as_pair(query, document)
        except TooManyTokensError:
            raise self._too_long(f"more than {self._max_context}", where) from None
        if self._limit is not None:
            ids = ids[: max(1, self._limit - len(before) - len(after))]
        return self._checked([*before, *ids, *after], where)

    def _in_prompt(self, prompt: str, values: Mapping[str, str]) -> Parts:
        """The prompt's text before the line of its first place, the lines up to its last place, and the rest. They are
        tokenised apart, as the model card of Qwen3-Reranker does."""
        encode, literal = self._tokenizer.encode, self._tokenizer.literal
        first, *_, last = _PLACES.finditer(prompt)
        begin, end = prompt.rfind("\n", 0, first.start()) + 1, last.end()
        text = _PLACES.sub(lambda place: values[place[1]], prompt[begin:end])
        ids = encode(literal(self._begin(text, self._limit)), add_special_tokens=True)
        return encode(prompt[:begin]), ids, encode(prompt[end:])

    def _as_pair(self, query: str, document: str) -> Parts:
        """The tokenizer's special tokens and the query, the document, and the special tokens after it."""
        encode, literal = self._tokenizer.encode, self._tokenizer.literal
        first, second = (encode(literal(self._begin(text, self._limit))) for text in (query, document))
        before, between, after = self._tokenizer.pair_frame
        return [*before, *first, *between], second, [*after]

    def cut(self, text: str, limit: int | None) -> str:
        """The text of at most `limit` tokens from the beginning of `text`."""
        if limit is None:
            return text
        ids = self._tokenizer.encode(self._begin(text, limit))
        return text if len(ids) <= limit else self._tokenizer.decode(ids[:limit], skip_special_tokens=False)

    def _begin(self, text: str, limit: int | None) -> str:
        """Enough of `text` for its first `limit` tokens, so that the cost does not depend on the rest; None: all.

        Later text changes only the tokens of the word that it continues.
        """
        size = _CHARS_PER_TOKEN * (limit or len(text))
        while size < len(text) and len(self._tokenizer.encode(text[:size])) < (limit or 0) + _LONGEST_WORD:
            size *= 2
        return text[:size]

    def _checked(self, ids: Sequence[int], where: str) -> tuple[int, ...]:
        if len(ids) > self._max_context:
            raise self._too_long(str(len(ids)), where)
        return tuple(ids)

    def _too_long(self, count: str, where: str) -> ApiError:
        return ApiError(
            400,
            f"{where} is too long: {count} tokens > {self._max_context} maximum, which the context holds; shorten it, "
            "or send truncate_prompt_tokens: -1",
            param=where,
            code=CONTEXT_LENGTH,
        )


def _without_middle(framed: list[int], plain: list[int], excess: int) -> list[int]:
    """`framed`, which has `plain` between special tokens, without the last `excess` tokens of `plain`."""
    begins = (at for at in range(len(framed) - len(plain) + 1) if framed[at : at + len(plain)] == plain)
    end = next(begins, 0) + len(plain)
    return [*framed[: max(end - excess, 0)], *framed[end:]][: len(framed) - excess]
