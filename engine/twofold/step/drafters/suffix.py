"""Suffix decoding (arXiv 2411.04975): proposes what most often followed the longest context that occurred before.

Contexts are those of the request's own prompt and answer and, if allowed, of answers to earlier requests. Requests with
a cache salt share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafters.suffix_automaton import ROOT, SuffixAutomaton
from twofold.step.drafters.token_index import chance_after
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence

_TOKENS_AT_ONCE: Final = 1024
"""Tokens of a prompt added in one step, in about 5 ms. Nothing is proposed until all are."""
_MOST_TOKENS: Final = 100_000
"""Most tokens of one automaton: 60 MB."""


@dataclass(slots=True)
class _Place:
    """State of a sequence in the drafter."""

    own: SuffixAutomaton
    num_added: int = 0
    """Leading tokens that are in `own`."""
    earlier: tuple[SuffixAutomaton, ...] = ()
    """Automata of earlier answers, followed along this answer."""
    states: list[tuple[int, int]] | None = None
    """State and length of the context in each of them."""
    num_followed: int = 0


class EarlierAnswers:
    """Newest answers of a server, in two automata: when the younger is full, the older is dropped."""

    def __init__(self, max_requests: int, max_context: int) -> None:
        self._half = -(-max_requests // 2)
        self._max_context = max_context
        self._num_requests = 0
        self.automata: tuple[SuffixAutomaton, ...] = ()

    def add(self, tokens: list[int]) -> None:
        if (
            not self.automata
            or self._num_requests >= self._half
            or self.automata[0].num_tokens >= _MOST_TOKENS
        ):
            self.automata = (SuffixAutomaton(self._max_context), *self.automata[:1])
            self._num_requests = 0
        self._num_requests += 1
        newest = self.automata[0]
        newest.begin_text()
        for token in tokens[:_MOST_TOKENS]:
            newest.add(token)


class SuffixDrafter(Drafter):
    """See `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._max_context = config.suffix_decoding_max_tree_depth
        most = config.suffix_decoding_max_cached_requests
        self._answers = EarlierAnswers(most, self._max_context) if most else None

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        state, tokens = sequence.drafting, sequence.token_ids
        assert state is not None, "a sequence without a drafter"
        if state.memory is None:
            state.memory = _Place(SuffixAutomaton(self._max_context))
        place: _Place = state.memory
        end = min(len(tokens), place.num_added + _TOKENS_AT_ONCE, _MOST_TOKENS)
        for token in tokens[place.num_added : end]:
            place.own.add(token)
        place.num_added = end
        if end < len(tokens):
            return NOTHING
        drafts = [self._continued(place.own, *place.own.repeated_end(), depth)]
        if self._answers is not None and not sequence.request.cache_salt:
            drafts += self._from_earlier(self._answers, place, sequence, depth)
        return max(drafts, key=_expected_tokens)

    def release(self, sequence: Sequence) -> None:
        if self._answers is not None and not sequence.request.cache_salt:
            self._answers.add(sequence.token_ids[sequence.num_prompt_tokens :])

    def _from_earlier(
        self, answers: EarlierAnswers, place: _Place, sequence: Sequence, depth: int
    ) -> list[Draft]:
        """A draft of each automaton of earlier answers."""
        if place.states is None or place.earlier != answers.automata:
            place.earlier, place.states = answers.automata, [(ROOT, 0)] * len(answers.automata)
            place.num_followed = max(len(sequence.token_ids) - self._max_context, sequence.num_prompt_tokens)
        for token in sequence.token_ids[place.num_followed :]:
            place.states = [
                each.follow(*at, token) for each, at in zip(place.earlier, place.states, strict=True)
            ]
        place.num_followed = len(sequence.token_ids)
        return [
            self._continued(each, *at, depth) for each, at in zip(place.earlier, place.states, strict=True)
        ]

    def _continued(self, automaton: SuffixAutomaton, state: int, length: int, depth: int) -> Draft:
        """The likeliest tokens after a context of `length` tokens."""
        config = self._config
        depth = min(depth, int(config.suffix_decoding_max_spec_factor * length))
        tokens, chances = list[int](), list[float]()
        together = 1.0
        while len(tokens) < depth and (found := automaton.likeliest(state, length)) is not None:
            together *= found.share
            if together < config.suffix_decoding_min_token_prob:
                break
            state, length = found.state, found.length
            tokens.append(found.token)
            chances.append(found.share * chance_after(length))
        return Draft(tuple(tokens), tuple(chances)) if tokens else NOTHING


def _expected_tokens(draft: Draft) -> float:
    expected, together = 0.0, 1.0
    for chance in draft.chances:
        together *= chance
        expected += together
    return expected
