"""Prompt lookup: proposes what followed the newest tokens earlier in the same request's prompt and answer."""

from __future__ import annotations

from typing import Final

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafters.token_index import TokenIndex, chance_after
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence

_TOKENS_AT_ONCE: Final = 4096
"""Tokens of a prompt indexed in one step, in about 2 ms. Nothing is proposed until all are."""
_TOKENS_BEHIND: Final = 16
"""Tokens after which the index is extended even if the newest ones are new to it."""


class NgramDrafter(Drafter):
    """See `Drafter`."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        config, state, tokens = self._config, sequence.drafting, sequence.token_ids
        assert state is not None, "a sequence without a drafter"
        if state.memory is None:
            state.memory = TokenIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        index: TokenIndex = state.memory
        if (
            not index.knows_end_of(tokens)
            and 0 < index.num_indexed >= sequence.num_prompt_tokens - 1
            and len(tokens) - index.num_indexed < _TOKENS_BEHIND
        ):
            return NOTHING
        # Up to the token before the newest, so that each occurrence has a token after it.
        end = min(len(tokens) - 1, index.num_indexed + _TOKENS_AT_ONCE)
        index.extend(tokens, end)
        if end < len(tokens) - 1:
            return NOTHING
        match = index.longest(tokens, tokens[-config.prompt_lookup_max :])
        if match is None:
            return NOTHING
        drafted = tokens[match.end : match.end + depth]
        period = len(tokens) - match.end
        while len(drafted) < depth:  # the text repeats itself: the draft continues with its own tokens
            drafted.append(drafted[-period])
        chances = tuple(chance_after(match.length + position) for position in range(depth))
        return Draft(tuple(drafted), chances)
