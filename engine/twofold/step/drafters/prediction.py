"""Predicted outputs: proposes the text that a request's `prediction` expects as its answer.

The drafter follows the prediction while the answer equals it. After a difference it continues where the answer's newest
tokens occur in the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafters.token_index import TokenIndex, chance_after
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence


@dataclass(slots=True)
class _Place:
    """How far a sequence's answer follows its prediction."""

    index: TokenIndex
    next: int | None = 0
    """Position in the prediction of the token expected next; None: lost."""
    length: int = 8
    """Tokens up to there that equal the answer's. A new answer is trusted as if this many did."""
    num_seen: int = 0
    """Tokens of the answer that `next` takes into account."""


class PredictionDrafter(Drafter):
    """See `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        state, prediction = sequence.drafting, sequence.request.prediction
        assert state is not None, "a sequence without a drafter"
        if state.memory is None:
            state.memory = self._start(prediction)
        place: _Place = state.memory
        self._follow(place, sequence, prediction)
        if place.next is None:
            return NOTHING
        tokens = prediction[place.next : place.next + depth]
        return Draft(tokens, tuple(chance_after(place.length + position) for position in range(len(tokens))))

    def _start(self, prediction: tuple[int, ...]) -> _Place:
        index = TokenIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        index.extend(prediction, len(prediction))
        return _Place(index)

    def _follow(self, place: _Place, sequence: Sequence, prediction: tuple[int, ...]) -> None:
        """Take the answer's new tokens into account."""
        tokens = sequence.token_ids
        for token in tokens[sequence.num_prompt_tokens + place.num_seen :]:
            if place.next is not None and place.next < len(prediction) and prediction[place.next] == token:
                place.next += 1
                place.length += 1
            else:
                place.next = None
        place.num_seen = sequence.num_generated
        if place.next is None:
            newest = tokens[max(sequence.num_prompt_tokens, len(tokens) - self._config.prompt_lookup_max) :]
            match = place.index.longest(prediction, newest)
            if match is not None:
                place.next, place.length = match
