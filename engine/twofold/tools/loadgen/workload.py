"""Workload: prompts of given lengths, and conversations that grow turn by turn.

The same seed gives the same requests, in whatever order they are sent. Prompts of different conversations begin
differently, except for `prefix_len` shared tokens: prefix-cache hits are deliberate, not accidental.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from twofold.api.errors import ConfigError
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError
from twofold.tools.loadgen.lengths import CHAT_INPUT, CHAT_OUTPUT

Dataset = Literal["random", "tale"]
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_CHARS_PER_TOKEN: Final = 4


@dataclass(frozen=True)
class PromptShape:
    """Lengths, in tokens."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    """Tokens of `input_len` that are the same in all conversations."""
    num_turns: int = 1
    turn_input_len: int = 64
    """Input tokens of each turn after the first, not counting the history."""
    drawn: bool = False
    """Draw both lengths per conversation, as people chat (lengths.py), up to `input_len` and `output_len`."""
    lengths_seed: int = 0

    def of_conversation(self, number: int) -> PromptShape:
        """The lengths of one conversation."""
        if not self.drawn:
            return self
        draw = random.Random(f"{self.lengths_seed}/{number}/lengths")  # noqa: S311  the same for the same seed
        low = self.prefix_len + 1
        return replace(
            self,
            input_len=max(low, CHAT_INPUT.at_most(self.input_len).draw(draw)),
            output_len=CHAT_OUTPUT.at_most(self.output_len).draw(draw),
        )


@dataclass(frozen=True)
class Workload:
    """Builds the requests for one server and model."""

    path: str
    """Path of the endpoint."""
    dataset: Dataset
    words: Sequence[str] | Sequence[int]
    """Vocabulary of prompts: token ids for completions, otherwise words (of `tale` in their order)."""
    extra_body: Mapping[str, Any]
    """Fields of every request besides the prompt and the answer's length."""
    seed: int = 0
    words_per_token: float = 1.0
    overhead_tokens: float = 0.0
    """Tokens of an empty prompt: the chat template's."""

    def conversation(self, number: int, shape: PromptShape) -> Conversation:
        """The conversation with this number."""
        return Conversation(self, number, shape.of_conversation(number))

    def words_of(self, num_tokens: float, key: str) -> list[Any]:
        """Words for about this many tokens (exact for ids), drawn with `key`."""
        draw = random.Random(f"{self.seed}/{key}")  # noqa: S311  the same prompts for the same seed
        count = max(1, round(num_tokens * self.words_per_token))
        if self.dataset == "random":
            return [draw.choice(self.words) for _ in range(count)]
        begin = draw.randrange(len(self.words))
        return [self.words[(begin + place) % len(self.words)] for place in range(count)]

    def joined(self, words: Sequence[Any]) -> Any:
        """A prompt of these words; ids stay a list."""
        return list(words) if isinstance(self.words[0], int) else " ".join(words)


class Conversation:
    """The requests of one conversation, in order."""

    def __init__(self, workload: Workload, number: int, shape: PromptShape) -> None:
        self._workload, self.number, self._shape = workload, number, shape
        self._messages: list[dict[str, str]] = []

    def body(self, turn: int, last_answer: str = "") -> dict[str, Any]:
        """The request of `turn`, counted from 1; `last_answer`: the answer of the previous turn."""
        work, shape = self._workload, self._shape
        if turn == 1:
            prefix = work.words_of(shape.prefix_len, "prefix") if shape.prefix_len else []
            rest = shape.input_len - shape.prefix_len - work.overhead_tokens
            words = [*prefix, *work.words_of(rest, f"{self.number}/1")]
        else:
            self._messages.append({"role": "assistant", "content": last_answer})
            words = work.words_of(shape.turn_input_len, f"{self.number}/{turn}")
        prompt = work.joined(words)
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": shape.output_len, "seed": self.number & 0x7FFFFFFF} | dict(work.extra_body)
        if work.path == COMPLETIONS:
            return body | {"prompt": prompt}
        self._messages.append({"role": "user", "content": prompt})
        return body | {"messages": list(self._messages)}


async def prepare(
    client: HttpClient,
    *,
    path: str,
    dataset: Dataset,
    tale: str,
    input_len: int,
    extra_body: Mapping[str, Any],
    seed: int,
) -> Workload:
    """Ask the server how its model tokenises.

    Completions get token ids if the server has vLLM's /tokenize. Otherwise prompts are words, whose number follows from
    the token counts of two prompts: from /tokenize, or from the usage of two requests with one token of answer. Unless
    the server accepts the whole tale, these are at most `input_len` tokens long.

    Raises:
        HttpStatusError, OSError, ValueError: the server does not answer.
        ConfigError: it does not report the tokens of a prompt.
    """
    words = tale.split()
    ids = await _token_ids(client, tale, extra_body.get("model"))
    if ids is None:
        # Possibly longer than the model's context.
        ids = await _token_ids(client, tale[: _CHARS_PER_TOKEN * input_len], extra_body.get("model"))
    if ids and path == COMPLETIONS:
        pool: Sequence[int] = sorted(set(ids)) if dataset == "random" else ids
        return Workload(path, dataset, pool, extra_body, seed=seed)
    plain = Workload(path, dataset, words, extra_body, seed=seed)
    count = _counter(client, plain, has_tokenize=ids is not None and path == CHAT)
    sizes = (1 + input_len // 8, 2 + input_len // 2)
    (small, few), (large, many) = [(size, await count(size)) for size in sizes]
    if many <= few:
        raise ConfigError(
            f"prompts of {small} and {large} words have {few} and {many} tokens by the server's count, which "
            "cannot be right; without the count, prompts of a given length cannot be made"
        )
    per_word = (many - few) / (large - small)
    overhead = max(0.0, few - small * per_word)
    return replace(plain, words_per_token=1 / per_word, overhead_tokens=overhead)


async def _token_ids(client: HttpClient, text: str, model: Any) -> list[int] | None:
    """The text's token ids; None for a server without vLLM's /tokenize."""
    body = {"prompt": text, "add_special_tokens": False} | ({"model": model} if model else {})
    try:
        answer = await client.json("POST", "/tokenize", body)
    except (HttpStatusError, ValueError):
        return None
    ids = answer.get("tokens") if isinstance(answer, dict) else None
    return ids if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids) else None


def _counter(client: HttpClient, plain: Workload, *, has_tokenize: bool) -> Callable[[int], Awaitable[int]]:
    """A function that counts the tokens of a prompt with a given number of words."""

    async def count(num_words: int) -> int:
        body = plain.conversation(-1, PromptShape(num_words, 1)).body(1)
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        if has_tokenize:
            requested = {name: body[name] for name in ("model", "messages") if name in body}
            return _count_in(await client.json("POST", "/tokenize", requested), "count")
        answer = await client.json("POST", plain.path, body)
        return _count_in(answer.get("usage") if isinstance(answer, dict) else None, "prompt_tokens")

    return count


def _count_in(holder: Any, name: str) -> int:
    """The count; 0 if it is missing."""
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) else 0
