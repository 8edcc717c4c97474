"""Whether two tokenizers give their token ids the same meaning, as a draft model's must."""

from __future__ import annotations

from typing import Final

from twofold.text.tokenizer import Tokenizer

_MOST_FURTHER: Final = 128
"""Tokens at the end that one of both may have alone: editions of a family add control tokens. llama.cpp allows as
many."""


def first_difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """The first token id with another text or another role in `other`, described; None: there is none."""
    own, theirs = one.texts(), other.texts()
    special, special_there = one.special_token_ids, other.special_token_ids
    shared = min(len(own), len(theirs))
    for token in range(shared):
        if own[token] != theirs[token]:
            return f"token {token} is {theirs[token]!r}, not {own[token]!r}"
        if (token in special) != (token in special_there):
            kinds = ("a control token", "text")
            return f"token {token} ({own[token]!r}) is {kinds[token in special]}, not {kinds[token not in special]}"
    if abs(len(own) - len(theirs)) > _MOST_FURTHER:
        return f"it has {len(theirs)} tokens, not {len(own)}"
    return None
