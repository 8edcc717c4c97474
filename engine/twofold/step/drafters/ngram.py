"""Prompt lookup: proposes what followed the newest tokens earlier in the same request's prompt and answer."""

from __future__ import annotations

from typing import Final

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafters.token_index import TokenIndex, TokenMatch, chance_after
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence

_TOKENS_AT_ONCE: Final = 4096
"""Tokens of a prompt indexed in one step, in about 2 ms. Nothing is proposed until all are."""
_MAX_UNINDEXED_TOKENS: Final = 16
"""Tokens after which the index is extended even if the newest ones are new to it."""


_FOLLOWED_FROM: Final = 8
"""Shortest match that shows that the text follows an earlier one."""
_FOLLOWED_FOR: Final = 24
"""Tokens after such a match for which the earlier text is still followed."""
_NEAR: Final = (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, 6, 7, 8)
"""Where the newest token is looked for in the followed text, in this order: tokens from the aligned one."""


class _Lookup:
    """Index of one sequence's text, and the earlier text that it follows."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.index = TokenIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._least = min(_FOLLOWED_FROM, config.prompt_lookup_max)
        self._shift = 0
        """Distance from a position to the position that it follows."""
        self._last = 0
        """Length of the text up to which an earlier one is followed."""

    def follows(self, num_tokens: int) -> bool:
        return num_tokens <= self._last

    def found(self, match: TokenMatch, num_tokens: int) -> None:
        if match.length >= self._least:
            self._shift, self._last = num_tokens - match.end, num_tokens + _FOLLOWED_FOR

    def after_difference(self, tokens: list[int]) -> TokenMatch:
        """Where the followed text goes on after the newest token, which is taken to replace as many tokens if it does
        not occur nearby."""
        newest, aligned = tokens[-1], len(tokens) - 1 - self._shift
        for step in _NEAR:
            if 0 <= aligned + step < len(tokens) - 1 and tokens[aligned + step] == newest:
                self._shift -= step
                break
        return TokenMatch(len(tokens) - self._shift, 1)


class NgramDrafter(Drafter):
    """See `Drafter`. Where a text differs from the earlier one that it follows, drafts go on after the difference."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        config, state, tokens = self._config, sequence.drafting, sequence.token_ids
        assert state is not None, "a sequence without a drafter"
        if state.memory is None:
            state.memory = _Lookup(config)
        lookup: _Lookup = state.memory
        index, follows = lookup.index, lookup.follows(len(tokens))
        if (
            not follows
            and not index.contains_end_of(tokens)
            and 0 < index.num_indexed >= sequence.num_prompt_tokens - 1
            and len(tokens) - index.num_indexed < _MAX_UNINDEXED_TOKENS
        ):
            return NOTHING
        # Up to the token before the newest, so that each occurrence has a token after it.
        end = min(len(tokens) - 1, index.num_indexed + _TOKENS_AT_ONCE)
        index.extend(tokens, end)
        if end < len(tokens) - 1:
            return NOTHING
        match = index.longest(tokens, tokens[-config.prompt_lookup_max :])
        if match is not None:
            lookup.found(match, len(tokens))
        elif follows:
            match = lookup.after_difference(tokens)
        else:
            return NOTHING
        drafted = tokens[match.end : match.end + depth]
        period = len(tokens) - match.end
        while len(drafted) < depth:  # the text repeats itself: the draft continues with its own tokens
            drafted.append(drafted[-period])
        chances = tuple(chance_after(match.length + position) for position in range(depth))
        return Draft(tuple(drafted), chances)
