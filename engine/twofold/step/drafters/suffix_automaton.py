"""Suffix automaton of token sequences, with counts of what followed each short context.

Blumer et al. 1985, built online: each state is a set of equal contexts, and one further token costs amortised constant
time. It finds the longest context that occurred before without a bound on its length.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = 0


class Follower(NamedTuple):
    """The token that most often followed a context."""

    token: int
    share: float
    """Share of the context's occurrences with a token after them."""
    state: int
    length: int
    """Length of the context with the token."""


class SuffixAutomaton:
    """Contexts of up to `max_context` tokens are counted. Memory: about 600 bytes per token."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = ROOT
        """State of the whole text so far."""
        self._newest = ROOT, 0
        """State and length of its longest end that is counted."""
        self.num_tokens = 0

    def begin_text(self) -> None:
        """Start a new text: the next tokens do not follow the previous ones."""
        self._last, self._newest = ROOT, (ROOT, 0)

    def add(self, token: int) -> None:
        self.num_tokens += 1
        self._last = self._extended(token)
        self._count_newest(token)

    def repeated_end(self) -> tuple[int, int]:
        """State and length of the longest end of the text that occurred before."""
        link = max(self._link[self._last], ROOT)
        return self.counted(link, self._length[link])

    def counted(self, state: int, length: int) -> tuple[int, int]:
        """The longest counted end of a context, and the state that it is in since the automaton grew."""
        length = min(length, self._max_context)
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """State and length of the longest known end of a context and one more token."""
        state, length = self.counted(state, length)
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        found = self._next[state].get(token)
        return (ROOT, 0) if found is None else self.counted(found, length + 1)

    def likeliest(self, state: int, length: int) -> Follower | None:
        """The token that most often followed the longest context up to `length` that is counted with a token more."""
        state, length = self.counted(state, min(length, self._max_context - 1))
        followers = self._next[state]
        if not followers or length == 0:
            return None
        counts = self._count
        token = max(followers, key=lambda each: counts[followers[each]])
        total = sum(counts[each] for each in followers.values())
        count = counts[followers[token]]
        if total == 0:
            return None
        return Follower(token, count / total, followers[token], length + 1)

    def _extended(self, token: int) -> int:
        """The state of the text with one more token, made if it is new."""
        lengths, links, nexts = self._length, self._link, self._next
        at = self._last
        known = nexts[at].get(token)
        if known is not None:  # another text began alike
            return known if lengths[known] == lengths[at] + 1 else self._split(at, token, known)
        made = self._new_state({}, lengths[at] + 1)
        while at != -1 and token not in nexts[at]:
            nexts[at][token] = made
            at = links[at]
        if at == -1:
            links[made] = ROOT
        else:
            known = nexts[at][token]
            links[made] = known if lengths[known] == lengths[at] + 1 else self._split(at, token, known)
        return made

    def _split(self, at: int, token: int, known: int) -> int:
        """The shorter contexts of state `known`, which are no longer equal to its longer ones, as a state."""
        lengths, links, nexts = self._length, self._link, self._next
        made = self._new_state(dict(nexts[known]), lengths[at] + 1)
        links[made], self._count[made] = links[known], self._count[known]
        links[known] = made
        while at != -1 and nexts[at].get(token) == known:
            nexts[at][token] = made
            at = links[at]
        return made

    def _new_state(self, followers: dict[int, int], length: int) -> int:
        self._next.append(followers)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        return len(self._length) - 1

    def _count_newest(self, token: int) -> None:
        """Count the newest occurrence of each end of the text that is not too long."""
        state, length = self.counted(self._newest[0], min(self._newest[1], self._max_context - 1))
        self._newest = state, length = self.counted(self._next[state][token], length + 1)
        counts, links = self._count, self._link
        while state != ROOT:
            counts[state] += 1
            state = links[state]
