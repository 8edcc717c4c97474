"""Picks the next tokens from rows of logits, natively (`ops.pick_tokens`); a request's seed alone decides its draws.

Order, as in vLLM and Hugging Face's generate: tokens that the request's constraint forbids, tokens that must not come
(`bad_words`, `min_tokens`), `logit_bias`, penalties, temperature, top-k, top-p, min-p. Reported log probabilities are
of the logits before all of these but the constraint, as vLLM's are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from twofold.api.constraints import TokenMatcher
from twofold.api.types import Draw, SamplingParams, TokenLogprob
from twofold.blocks import ops

F32 = NDArray[np.float32]
_DRAWS_AT_ONCE: Final = 64


class Sampler:
    """The sampling state of one request: its random generator and what its penalties and rules need.

    `sample` picks for the samplers of a step. Where a device picks, `draw` says by which numbers and `take` hears what
    came of it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        default_seed: int | None = None,
        eos_token_ids: Collection[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        """What the answer must match, and how far it does."""
        self.logprob: TokenLogprob | None = None
        """Of the newest token, if the request asked."""
        self.rules = _rules(params, prompt, eos_token_ids)
        seed = params.seed if params.seed is not None else default_seed
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._drawn: list[float] = []
        """Uniform numbers, the next one last."""

    def draw(self) -> Draw | None:
        """What decides the next token besides its logits; the same until one is taken. None: the host needs these."""
        if self.rules is not None or self.matcher is not None or self.params.logprobs is not None:
            return None
        return Draw(*self.numbers())

    def numbers(self) -> tuple[float, int, float, float, float]:
        """Temperature, top-k, top-p, min-p and the uniform number of the next token."""
        params = self.params
        if params.temperature == 0.0:
            return 0.0, 0, 1.0, 0.0, 0.0
        return params.temperature, params.top_k, params.top_p, params.min_p, self.uniform()

    def uniform(self) -> float:
        """The number that the next token is drawn by, in [0, 1); the same until one is taken."""
        if (
            not self._drawn
        ):  # several at once, which are those that single calls would give, for a fraction of the time
            self._drawn = self._random.random(_DRAWS_AT_ONCE)[::-1].tolist()
        return self._drawn[-1]

    def draw_again(self) -> float:
        """The next number in place of `uniform`'s, whose token may not come."""
        if self._drawn:
            self._drawn.pop()
        return self.uniform() if self.params.temperature != 0.0 else 0.0

    def take_from(self, token: int, logits: F32, row: int) -> int:
        """`token` was picked from row `row` of `logits` (rows, vocabulary): it is taken, and returned."""
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """The next token has been picked."""
        if self._drawn:
            self._drawn.pop()
        if self.rules is not None:
            self.rules.take(token)
        if self.matcher is not None:
            self.matcher.take(token)


class SamplerBatch:
    """The samplers of a step as the native call takes them; good for every step in which the same ones pick."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = samplers
        self._draws = np.array([sampler.numbers() for sampler in samplers], np.float64)
        self._rules = [sampler.rules for sampler in samplers]
        self._drawing = [row for row, sampler in enumerate(samplers) if sampler.params.temperature != 0.0]
        self._constrained = [(row, s.matcher) for row, s in enumerate(samplers) if s.matcher is not None]
        self._masked = [each for each in self._constrained if each[1].masks_first]
        self._asked = [(row, top) for row, s in enumerate(samplers) if (top := s.params.logprobs) is not None]

    def pick(self, pool: ops.ThreadPool, logits: F32) -> list[int]:
        """The next token of every sampler, taken by it; `logits` (samplers, vocabulary) are as before afterwards, but
        for the rows that a constraint masks.

        A NaN is never picked; a row with nothing above -inf gives 0. Raises KernelError where the shapes do not fit.
        """
        samplers = self.samplers
        if not samplers:
            return []
        if self._drawing:
            self._draws[self._drawing, -1] = [samplers[row].uniform() for row in self._drawing]
        if self._masked:
            self._mask(pool, logits, self._masked)
        picked: list[int] = ops.pick_tokens(pool, logits, self._draws, self._rules).tolist()
        if self._constrained:
            self._check(pool, logits, picked)
        tokens = [
            sampler.take_from(token, logits, row)
            for row, (sampler, token) in enumerate(zip(samplers, picked, strict=True))
        ]
        if self._constrained:
            self._constrained[0][1].prepare()
        if self._asked:
            rows = [row for row, _ in self._asked]
            chosen = [tokens[row] for row in rows]
            found = logprobs(pool, logits, rows, chosen, [top for _, top in self._asked])
            for row, logprob in zip(rows, found, strict=True):
                samplers[row].logprob = logprob
        return tokens

    def _mask(self, pool: ops.ThreadPool, logits: F32, rows: Sequence[tuple[int, TokenMatcher]]) -> None:
        ops.mask_logits(pool, logits, [row for row, _ in rows], [matcher.mask() for _, matcher in rows])

    def _check(self, pool: ops.ThreadPool, logits: F32, picked: list[int]) -> None:
        """Mask and pick again where a matcher does not take its token, and tell it where none is left."""
        left = self._constrained
        while left:
            again = []
            for each in left:
                row, matcher = each
                token = picked[row]
                # The one that a row gives which has nothing above -inf.
                if token == 0 and logits[row, 0] == -np.inf:
                    matcher.fail("no token is possible (bad_words, or logits that are not numbers)")
                elif not matcher.admits(token):
                    again.append(each)
            left = again
            if left:
                self._mask(pool, logits, left)
                rows = [row for row, _ in left]
                for row in rows:
                    logits[row, picked[row]] = -np.inf
                    self._draws[row, -1] = self.samplers[row].draw_again()
                rules = [self._rules[row] for row in rows]
                tokens = ops.pick_tokens(pool, logits[rows], self._draws[rows], rules).tolist()
                for row, token in zip(rows, tokens, strict=True):
                    picked[row] = token


def needs_masks(params: SamplingParams) -> bool:
    """Whether a constraint's mask must be applied before a token is picked.

    Elsewhere a token is picked from the model's distribution, and only if it may not come, another from what the mask
    leaves, by the next random number: the probability of t is p(t) + (1 - A) p(t) / A = p(t) / A, with A that of all
    that may come, which is the masked distribution's; and the highest of all is the highest of those that may come.
    So most tokens need no mask. Filters cut differently where the mask was applied before, and log probabilities are of
    the masked distribution.
    """
    filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return params.logprobs is not None or (filters and params.temperature != 0.0)


def sample(pool: ops.ThreadPool, samplers: Sequence[Sampler], logits: F32) -> list[int]:
    """`SamplerBatch.pick` of one step."""
    return SamplerBatch(samplers).pick(pool, logits)


def logprobs(
    pool: ops.ThreadPool, logits: F32, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probabilities of `tokens[i]` in row `rows[i]` of `logits` (any, vocabulary), and of its likeliest ones."""
    answers = ops.log_probabilities(pool, logits, rows, tokens, num_top)
    return [
        # Tokens that a constraint forbids are none of the likeliest, however few are left.
        TokenLogprob(token, value, tuple(each for each in top if each[1] != -np.inf))
        for (token, value), *top in answers
    ]


def pick_undecided(
    pool: ops.ThreadPool,
    samplers: Sequence[Sampler],
    picked: Sequence[int],
    logits: Callable[[list[int]], F32],
) -> list[int]:
    """The tokens of a step that a device has sampled; those below 0 it could not decide, and the host does.

    Args:
        samplers: of the step's rows.
        picked: a token for each, or a number below 0.
        logits: of the rows given, asked only where they are needed.
    """
    tokens = list(picked)
    open_rows = [row for row, token in enumerate(picked) if token < 0]
    if open_rows:
        found = sample(pool, [samplers[row] for row in open_rows], logits(open_rows))
        for row, token in zip(open_rows, found, strict=True):
            tokens[row] = token
    for sampler, token in zip(samplers, picked, strict=True):
        if token >= 0:
            sampler.take(token)
    return tokens


def _rules(
    params: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]
) -> ops.TokenRules | None:
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    if not (penalised or params.logit_bias or params.bad_words or params.min_tokens):
        return None
    return ops.TokenRules(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=params.logit_bias,
        bad_words=params.bad_words,
        withheld=sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else (),
        min_tokens=params.min_tokens,
        prompt=prompt,
    )
