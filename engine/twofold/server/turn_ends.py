"""Where another prompt may go on otherwise than this one: before its last message, and before the answer.

Models whose layers keep a record of a sequence can take a conversation up only where a snapshot of the record was made
(`engine.prefix_cache`); these are the places where one pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twofold.api.errors import RequestError
from twofold.server.protocol import ServingTokenizer


def turn_ends(
    text: str,
    token_ids: Sequence[int],
    renderings: Sequence[Callable[[], str]],
    tokenizer: ServingTokenizer,
) -> tuple[int, ...]:
    """Ascending numbers of `token_ids`, which are those of `text` or its last ones.

    renderings: of the conversation without what another may have otherwise; one that the template refuses tells
    nothing.
    """
    ends = set()
    for render in renderings:
        try:
            same = _num_common(text, render())
        except RequestError:
            continue
        # What is left is short: its tokens are cheaper to count than those before it.
        ends.add(len(token_ids) - len(tokenizer.encode(text[same:])))
    return tuple(sorted(end for end in ends if 0 < end < len(token_ids)))


def _num_common(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
