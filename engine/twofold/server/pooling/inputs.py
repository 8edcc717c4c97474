"""Token ids of inputs to pool. Runs on worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from twofold.server.bridge.bounded_tokenizer import TooManyTokensError
from twofold.server.bridge.protocol import ServingTokenizer
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError
from twofold.server.pooling.schemas import Input

# Qwen3-Reranker's prompt as its model card publishes it; prefix, pair and suffix are tokenised apart.
PREFIX: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"

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

    def pair(self, query: str, document: str, where: str, *, instruction: str | None) -> tuple[int, ...]:
        """Token ids of a query and a document in the prompt of Qwen3-Reranker; control tokens in them are text."""
        encode, literal = self._tokenizer.encode, self._tokenizer.literal
        around = encode(PREFIX), encode(SUFFIX)
        pair = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        try:
            ids = encode(literal(self._begin(pair, self._limit)), add_special_tokens=True)
        except TooManyTokensError:
            raise self._too_long(f"more than {self._max_context}", where) from None
        if self._limit is not None:
            ids = ids[: max(1, self._limit - sum(map(len, around)))]
        return self._checked([*around[0], *ids, *around[1]], where)

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
