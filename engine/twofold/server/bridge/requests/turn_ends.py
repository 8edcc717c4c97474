"""Positions at which another prompt may diverge from this one: before its last message, and before the answer.

Models whose layers keep a record of a sequence can resume a conversation only at a snapshot of that record
(`engine.prefix_cache`). These are the positions where a snapshot is worth its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twofold.api.errors import RequestError
from twofold.server.bridge.models.protocol import ServingTokenizer


def turn_ends(
    text: str,
    token_ids: Sequence[int],
    renderings: Sequence[Callable[[], str]],
    tokenizer: ServingTokenizer,
) -> tuple[int, ...]:
    """Ascending positions in `token_ids`, the tokens of `text` or of its end.

    renderings: the conversation without the parts that may differ in another prompt; one that the template refuses is
    skipped.
    """
    ends = set()
    for render in renderings:
        try:
            same = _num_common(text, render())
        except RequestError:
            continue
        # The rest is short: its tokens are cheaper to count than those before it.
        ends.add(len(token_ids) - len(tokenizer.encode(text[same:])))
    return tuple(sorted(end for end in ends if 0 < end < len(token_ids)))


def _num_common(one: str, other: str) -> int:
    """Length of the common prefix in characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
