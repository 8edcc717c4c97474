"""Byte-level vocabularies that list tokens by merge rank, without merges → a backend of `tokenizers`."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from twofold.text.tokenizer.pieces import character_of_byte


def ranked_backend(
    ranks: Mapping[bytes, int],
    words: pre_tokenizers.PreTokenizer,
    control: Mapping[str, int] | None = None,
) -> tokenizers.Tokenizer:
    """A tokenizer of `ranks`, token → id in rank order, that merges within words. A whole word is its token.

    control: tokens of the vocabulary besides, token → id; the caller adds them as special tokens. Raises ValueError if
    an id or a text occurs twice.
    """
    vocabulary = dict(control or {})
    for token, token_id in ranks.items():
        vocabulary.setdefault(spelled(token), token_id)
    if len(set(vocabulary.values())) < len(ranks) + len(control or {}):
        raise ValueError("an id or a text occurs twice")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges_of(ranks), ignore_merges=True))
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """For each token, in rank order, the two tokens that lower-ranked merges leave of it."""
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1 and len(parts := _merged(token, ranks, rank)) == 2:
            merges.append((spelled(parts[0]), spelled(parts[1])))
    return merges


def _merged(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        lowest, at = min((ranks.get(parts[at] + parts[at + 1], below), at) for at in range(len(parts) - 1))
        if lowest >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def spelled(token: bytes) -> str:
    table = character_of_byte()
    return "".join(map(table.__getitem__, token))
