"""Log probabilities in the APIs' formats: OpenAI's two, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from twofold.api.types import TokenLogprob
from twofold.server.bridge.models.protocol import ServingTokenizer


class TokenNames:
    """Names of single tokens in answers."""

    def __init__(self, tokenizer: ServingTokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self.special = tokenizer.special_token_ids

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        r"""The token's text; half a character as OpenAI writes it (bytes:\xe2\x80), so that no two tokens share a
        name."""
        if self._as_ids:
            return f"token_id:{token_id}"
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions, for a whole answer or one chunk."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": names.name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(names.bytes_of(token_id)),
        }

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*candidate) for candidate in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions for one choice; tracks its text offset.

    `text_offset` counts characters of the choice's text, which begins with the prompt if that is echoed.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], text: str
    ) -> dict[str, Any]:
        """Log probabilities of an echoed prompt. Special tokens that the tokenizer put before `text` have no
        characters."""
        added = 0
        special = self._names.special
        while added < len(token_ids) and token_ids[added] in special:
            if text.startswith(self._names.bytes_of(token_ids[added]).decode(errors="replace")):
                break
            added += 1
        return self._body(token_ids, entries, [position >= added for position in range(len(token_ids))])

    def of_answer(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log probabilities of the whole answer or of its next piece. Special tokens have no text there."""
        special = self._names.special
        ids = [entry.token_id for entry in entries]
        return self._body(ids, entries, [token_id not in special for token_id in ids])

    def _body(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], has_text: Sequence[bool]
    ) -> dict[str, Any]:
        names = self._names
        offsets = []
        for token_id, shown in zip(token_ids, has_text, strict=True):
            offsets.append(self._offset)
            if shown:
                self._offset += len(self._decoder.decode(names.bytes_of(token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "tokens": [names.name(token_id) for token_id in token_ids],
            "top_logprobs": [None if entry is None else _top(names, entry) for entry in entries],
        }


def joined(bodies: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Join the pieces of one choice's `CompletionLogprobs`."""
    return {name: [value for body in bodies for value in body[name]] for name in bodies[0]}


def prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: the most likely tokens per prompt token, by token id. None for the first token.

    `rank` is null for a token that is not among the most likely ones.
    """
    shown: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            shown.append(None)
            continue
        ranks: dict[int, tuple[float, int | None]] = {token_id: (entry.logprob, None)}
        ranks |= {top_id: (logprob, rank) for rank, (top_id, logprob) in enumerate(entry.top, start=1)}
        shown.append(
            {
                str(one_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.name(one_id)}
                for one_id, (logprob, rank) in ranks.items()
            }
        )
    return shown


def _top(names: TokenNames, entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens, plus the token itself if it is not one of them."""
    top = {names.name(token_id): _finite(logprob) for token_id, logprob in entry.top}
    top.setdefault(names.name(entry.token_id), _finite(entry.logprob))
    return top


def _finite(logprob: float) -> float:
    """A finite value for JSON, which has no infinity; OpenAI writes -9999 for impossible tokens."""
    return max(logprob, -9999.0)
