"""An engine of this process as what answers in `twofold chat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams, Usage
from twofold.models.registry import chat_marks
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.events import Event
from twofold.tools.cli.answer_reader import read_answer
from twofold.tools.cli.chat.sources import Answer, Piece, Summary, Turns
from twofold.tools.cli.picture_prompts import RenderedPrompt, rendered_prompt

if TYPE_CHECKING:
    from twofold.engine import Engine

_LEAST_ROOM: Final = 64
"""Tokens kept free for an answer: the oldest turns are dropped before the context is fuller than this."""


class LocalModel:
    """An engine of this process."""

    def __init__(self, engine: Engine, defaults: SamplingParams) -> None:
        """defaults: sampling without a user's choice."""
        if not engine.tokenizer.has_chat_template:
            raise ConfigError(
                f"{engine.info.model} has no chat template; use: twofold generate --raw --prompt …"
            )
        self._engine = engine
        self._defaults = defaults
        self._marks = chat_marks(engine.info.architecture, engine.tokenizer.chat_template)
        special = engine.tokenizer.special_token_ids
        marks = {engine.tokenizer.token_id(token) for token in self._marks.tokens}
        self._shown = frozenset(found for found in marks if found is not None and found in special)

    @property
    def model(self) -> str:
        return Path(self._engine.info.model).name

    @property
    def models(self) -> list[str]:
        return [self.model]

    def choose(self, model: str) -> None:
        if model != self.model:
            raise ConfigError(
                f"this process has loaded {self.model} alone; with --base-url, chat changes between a server's models"
            )

    def answer(self, turns: Turns, sampling: Mapping[str, Any]) -> Answer:
        prompt, num_dropped = self._prompt(list(turns))
        if num_dropped:
            yield Piece("note", f"the context is full: without the {num_dropped} oldest turns")
        parser = AnswerParser(
            None, self._marks.reasoning_parser, reasoning_opened=self._marks.opened_by(prompt.text)
        )
        usage, reason, before = Usage(len(prompt.token_ids), 0), None, self._engine.stats().placement
        params = dataclasses.replace(self._defaults, **sampling)
        for chunk in read_answer(
            self._engine,
            prompt.token_ids,
            params,
            endpoint="chat",
            shown_tokens=self._shown,
            media=prompt.media,
        ):
            events = parser.push(chunk.text)
            yield from _pieces(events if chunk.finish_reason is None else [*events, *parser.finish()])
            usage, reason = chunk.usage or usage, chunk.finish_reason
        # The first token comes from the prefill; decode_s covers the others.
        decoded, now = usage.completion_tokens - 1, self._engine.stats().placement
        hits = now.hits - before.hits
        routed = hits + now.cpu_misses - before.cpu_misses + now.fetched - before.fetched
        yield Summary(
            usage.completion_tokens,
            decoded / usage.decode_s if decoded > 0 and usage.decode_s > 0 else None,
            hits / routed if routed and self._engine.info.num_slots else None,
            usage.clock == "virtual",
            reason == "length",
        )

    def _prompt(self, turns: list[Mapping[str, Any]]) -> tuple[RenderedPrompt, int]:
        """The conversation as a prompt, without its oldest turns if the context is too small for all; and how many
        those are."""
        begin = 1 if turns and turns[0]["role"] == "system" else 0
        num_dropped = 0
        while True:
            prompt = rendered_prompt(self._engine, turns)
            fits = len(prompt.token_ids) + _LEAST_ROOM <= self._engine.max_context
            if fits or len(turns) - begin < 3:
                return prompt, num_dropped
            del turns[begin : begin + 2]
            num_dropped += 2


def _pieces(events: Sequence[Event]) -> Iterator[Piece]:
    for event in events:
        if event.kind in ("reasoning", "content") and event.text:
            yield Piece("reasoning" if event.kind == "reasoning" else "content", event.text)
