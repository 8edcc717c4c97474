"""Kinds of users: what each one asks, how long it thinks, and when it closes the connection.

No network and no clock here: a conversation is a generator of turns that receives each turn's answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.lengths import CHAT_INPUT, CHAT_OUTPUT

_WORDS_PER_TOKEN: Final = 0.74
_MAX_CHAT_TURNS: Final = 4
_MAX_AGENT_TURNS: Final = 6
_BURST: Final = 8
_LONG_SHARE: Final = 0.6
_MAX_LONG_PROMPT: Final = 32_768


@dataclass(frozen=True)
class Turn:
    """One request, and the user's behaviour around it."""

    body: dict[str, Any]
    think_s: float = 0.0
    """Time before the request."""
    patience_s: float | None = None
    """The user closes the connection after this time; None: it waits for the whole answer."""
    at_once: int = 1
    """Copies that are sent at the same time, each with a seed of its own."""


Conversation = Generator[Turn, AnswerStream | None, None]
"""Yields turns and receives the answers; None for one that failed or was given up."""


@dataclass
class Asker:
    """Source of one user's conversations."""

    random_source: random.Random
    model: str
    passages: tuple[str, ...]
    """Texts that prompts are made of."""
    max_context: int
    """Tokens of a prompt and its answer."""
    max_output_tokens: int
    calls_tools: bool = False
    """Whether the server accepts `tools`; otherwise an agent describes them in its prompt."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def words(self, num_tokens: int) -> str:
        """A text of about this many tokens that begins at a random passage."""
        found: list[str] = []
        while len(found) < max(1, round(num_tokens * _WORDS_PER_TOKEN)):
            found += self.random_source.choice(self.passages).split()
        return " ".join(found[: max(1, round(num_tokens * _WORDS_PER_TOKEN))])

    def body(self, max_tokens: int, **others: Any) -> dict[str, Any]:
        """A streamed chat request with the conversation so far."""
        return {
            "model": self.model,
            "messages": list(self.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "seed": self.random_source.randrange(2**31),
        } | others

    def output_tokens(self) -> int:
        return CHAT_OUTPUT.at_most(self.max_output_tokens).draw(self.random_source)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def chat(asker: Asker) -> Conversation:
    """A person who chats: one to four turns with drawn lengths and time to read between them."""
    draw = asker.random_source
    asker.messages = []
    longest = max(4, asker.max_context // (2 * _MAX_CHAT_TURNS + 2))
    for _ in range(draw.randint(1, _MAX_CHAT_TURNS)):
        length = CHAT_INPUT.at_most(longest).draw(draw)
        asker.ask(asker.words(length))
        output = min(asker.output_tokens(), longest)
        answer = yield Turn(asker.body(output), think_s=draw.uniform(0.2, 1.5))
        if answer is None:
            return
        asker.messages.append({"role": "assistant", "content": answer.text})


def long_prompt(asker: Asker) -> Conversation:
    """A person who pastes a document: a prompt of up to 60 % of the context, a short answer."""
    draw = asker.random_source
    longest = min(_MAX_LONG_PROMPT, int(asker.max_context * _LONG_SHARE))
    document = asker.words(draw.randint(longest // 2, longest))
    asker.messages = []
    asker.ask(f"{document}\n\nTell the end of this in one sentence.")
    yield Turn(asker.body(min(48, asker.max_output_tokens)), think_s=draw.uniform(1.0, 4.0))


def burst(asker: Asker) -> Conversation:
    """A script that sends eight requests at the same time, then waits."""
    draw = asker.random_source
    asker.messages = []
    asker.ask(asker.words(CHAT_INPUT.at_most(min(256, asker.max_context // 4)).draw(draw)))
    yield Turn(asker.body(min(32, asker.max_output_tokens)), think_s=draw.uniform(3.0, 6.0), at_once=_BURST)


def agent(asker: Asker) -> Conversation:
    """A coding agent: a long system prompt, a tool call in each turn, and a history that grows by the results."""
    draw = asker.random_source
    budget = asker.max_context
    system = "You look things up in a library of tales. " + asker.words(budget // 16)
    if not asker.calls_tools:
        system += " Tools: " + ", ".join(_TOOL_DESCRIPTIONS)
    asker.messages = [{"role": "system", "content": system}]
    asker.ask(asker.words(CHAT_INPUT.at_most(budget // 16).draw(draw)))
    tools = {"tools": list(TOOLS), "tool_choice": "required"} if asker.calls_tools else {}
    output = min(64, asker.max_output_tokens, budget // 16)
    for turn in range(draw.randint(2, _MAX_AGENT_TURNS)):
        answer = yield Turn(asker.body(output, **tools), think_s=draw.uniform(0.05, 0.3) if turn else 0.5)
        if answer is None:
            return
        result = asker.words(CHAT_INPUT.at_most(budget // 16).draw(draw))
        calls = [answer.tool_calls[index] for index in sorted(answer.tool_calls)]
        if not calls or answer.finish_reason == "length":  # a call that was cut off cannot be answered
            asker.messages.append({"role": "assistant", "content": answer.text})
            asker.ask(f"Result of the tool: {result}")
            continue
        asker.messages.append({"role": "assistant", "content": answer.text or None, "tool_calls": calls})
        asker.messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]


def impatient(asker: Asker) -> Conversation:
    """A person who closes the connection after 20 ms to 2 s, whatever has arrived; log-uniform."""
    draw = asker.random_source
    asker.messages = []
    asker.ask(asker.words(CHAT_INPUT.at_most(min(256, asker.max_context // 4)).draw(draw)))
    patience_s = 0.02 * 100 ** draw.random()
    output = min(asker.max_output_tokens, asker.max_context // 2)
    yield Turn(asker.body(output), think_s=draw.uniform(0.2, 1.5), patience_s=patience_s)


USER_KINDS: Final[dict[str, Callable[[Asker], Conversation]]] = {
    "chat": chat,
    "long-prompt": long_prompt,
    "burst": burst,
    "agent": agent,
    "impatient": impatient,
}
_TOOL_DESCRIPTIONS: Final = {
    "find_tale": "Find tales that contain a text.",
    "read_tale": "Read a tale by its title.",
    "write_note": "Keep a note.",
}
TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "maxLength": 24}},
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    for name, description in _TOOL_DESCRIPTIONS.items()
)


def parse_mix(text: str) -> dict[str, int]:
    """`KIND:WEIGHT`, separated by commas; a weight of 1 may be left out. ConfigError for anything else."""
    mix: dict[str, int] = {}
    for part in text.split(","):
        kind, _, weight = part.strip().partition(":")
        if (
            kind not in USER_KINDS
            or kind in mix
            or not (weight or "1").isdigit()
            or not 0 < int(weight or 1) < 1000
        ):
            raise ConfigError(
                f"{part!r} was given; KIND:WEIGHT is expected, each kind once, of {', '.join(USER_KINDS)}, and "
                "weights from 1 to 999, e.g. chat:8,agent:2"
            )
        mix[kind] = int(weight or 1)
    return mix
