"""Tokenises no more of a text than tells that it is too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from twofold.server.protocol import ServingTokenizer
from twofold.tokenizer import ToolForm

_CHARS_PER_TOKEN: Final = 8
"""Of the first piece. Text has about 4, so that most texts that fit are tokenised once."""
_SURELY: Final = 2


class TooManyTokensError(Exception):
    """A text has more than `more_than` tokens."""

    def __init__(self, more_than: int) -> None:
        super().__init__(more_than)
        self.more_than = more_than


class BoundedTokenizer:
    """A tokenizer whose work follows the model's context, not the text's length.

    A beginning of the text is tokenised first, then one twice as long: text that follows changes the tokens of the
    word it continues, and merges of a vocabulary do not halve the number of those before it, so twice the context's
    tokens in a beginning say that the whole is too long. A text that is not refused is always tokenised whole, at once:
    its ids are the tokenizer's own. All pieces together are less than twice the last one.
    """

    def __init__(self, tokenizer: ServingTokenizer, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_context = max_context

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`. TooManyTokensError when there are surely more than the context holds."""
        size = _CHARS_PER_TOKEN * self._max_context
        while size < len(text):
            if len(self._tokenizer.encode(text[:size])) > _SURELY * self._max_context:
                raise TooManyTokensError(self._max_context)
            size *= 2
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def stretches(self, text: str) -> list[str]:
        """Its parts, unless it may be too long."""
        if len(text) > _CHARS_PER_TOKEN * self._max_context:
            return [text]
        return self._tokenizer.stretches(text)

    def apply_chat_template(self, messages: list[dict[str, Any]], *arguments: Any, **options: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, *arguments, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_id(token)

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    @property
    def tool_form(self) -> ToolForm | None:
        return self._tokenizer.tool_form

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._tokenizer.special_token_ids

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def template_variables(self) -> frozenset[str]:
        return self._tokenizer.template_variables
