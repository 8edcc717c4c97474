"""Samples the next tokens from rows of logits, natively (`ops.pick_tokens`). A request's seed alone decides its draws.

The order is that of vLLM and Hugging Face's generate: constraint mask, forbidden tokens (`bad_words`, `min_tokens`),
`logit_bias`, penalties, temperature, top-k, top-p, min-p. Reported log probabilities are of the logits before all of
these but the constraint, as in vLLM.
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
_LEAST_TOP_P: Final = 1e-300


class Sampler:
    """Sampling state of one request: its random generator and the state of its penalties and rules.

    `sample` picks for all samplers of a step on the host. Where a device picks, `draw` returns its inputs and `take`
    receives the picked token.
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
        """Grammar state of the answer."""
        self.logprob: TokenLogprob | None = None
        """Log probability of the newest token, if requested."""
        self.rules = _rules(params, prompt, eos_token_ids)
        seed = params.seed if params.seed is not None else default_seed
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._drawn: list[float] = []
        """Precomputed uniform numbers, the next one last."""

    @property
    def is_plain(self) -> bool:
        """Whether a token depends on its logits and the random numbers alone, and nothing is reported about it."""
        return self.rules is None and self.matcher is None and self.params.logprobs is None

    @property
    def can_pick_ahead(self) -> bool:
        """Whether the tokens of several rows can be picked before any is taken. A matcher may still reject one."""
        matcher = self.matcher
        return (
            self.rules is None
            and self.params.logprobs is None
            and (matcher is None or not matcher.masks_first)
        )

    def draw(self, num_later: int = 0) -> Draw | None:
        """Device inputs for the next token besides its logits, or for one `num_later` tokens later; unchanged until a
        token is taken. None: the host must pick."""
        return Draw(*self.numbers(num_later)) if self.is_plain else None

    def numbers(self, num_later: int = 0) -> tuple[float, int, float, float, float]:
        """Temperature, top-k, top-p, min-p and the uniform number for the next token, or for a later one."""
        params = self.params
        if params.temperature == 0.0:
            return 0.0, 0, 1.0, 0.0, 0.0
        # No probability at all still keeps the most likely token.
        top_p = max(params.top_p, _LEAST_TOP_P)
        return params.temperature, params.top_k, top_p, params.min_p, self.uniform(num_later)

    def uniform(self, num_later: int = 0) -> float:
        """Uniform number in [0, 1) for the next token, or for a later one; unchanged until a token is taken."""
        if (
            len(self._drawn) <= num_later
        ):  # several at once: the same numbers as single draws, in a fraction of the time
            self._drawn[:0] = self._random.random(_DRAWS_AT_ONCE)[::-1].tolist()
        return self._drawn[-1 - num_later]

    def redraw(self) -> float:
        """The next number, used after the token drawn with `uniform` was forbidden."""
        if self._drawn:
            self._drawn.pop()
        return self.uniform() if self.params.temperature != 0.0 else 0.0

    def take_from(self, token: int, logits: F32, row: int) -> int:
        """Take and return `token`, picked from row `row` of `logits` (rows, vocabulary)."""
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Record the picked token."""
        if self._drawn:
            self._drawn.pop()
        if self.rules is not None:
            self.rules.take(token)
        if self.matcher is not None:
            self.matcher.take(token)


class SamplerBatch:
    """The samplers of a step in the form of the native call; reusable while the same samplers pick."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = samplers
        self._draws = np.array([sampler.numbers() for sampler in samplers], np.float64)
        self._rules = [sampler.rules for sampler in samplers]
        self._drawing = [row for row, sampler in enumerate(samplers) if sampler.params.temperature != 0.0]
        self._constrained = [(row, s.matcher) for row, s in enumerate(samplers) if s.matcher is not None]
        self._masked = [each for each in self._constrained if each[1].masks_first]
        self._logprob_rows = [
            (row, top) for row, s in enumerate(samplers) if (top := s.params.logprobs) is not None
        ]

    def pick(self, pool: ops.ThreadPool, logits: F32) -> list[int]:
        """Pick and take the next token of every sampler. `logits` (samplers, vocabulary) are unchanged afterwards,
        except for rows that a constraint masks.

        A NaN is never picked; a row with nothing above -inf yields 0. Raises KernelError if the shapes do not fit.
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
            for _, matcher in self._constrained:
                matcher.prepare()
        if self._logprob_rows:
            rows = [row for row, _ in self._logprob_rows]
            chosen = [tokens[row] for row in rows]
            found = logprobs(
                pool, logits, rows=rows, tokens=chosen, num_top=[top for _, top in self._logprob_rows]
            )
            for row, logprob in zip(rows, found, strict=True):
                samplers[row].logprob = logprob
        return tokens

    def _mask(self, pool: ops.ThreadPool, logits: F32, rows: Sequence[tuple[int, TokenMatcher]]) -> None:
        ops.mask_logits(pool, logits, [row for row, _ in rows], [matcher.mask() for _, matcher in rows])

    def _check(self, pool: ops.ThreadPool, logits: F32, picked: list[int]) -> None:
        """Take forced tokens. Where a matcher rejects its token, mask and pick again; fail the matcher if none is
        left."""
        left = []
        for row, matcher in self._constrained:
            forced = matcher.forced
            if forced is None:
                left.append((row, matcher))
            else:
                picked[row] = forced
        while left:
            again = []
            for each in left:
                row, matcher = each
                token = picked[row]
                # Token 0 is the result for a row with nothing above -inf.
                if token == 0 and logits[row, 0] == -np.inf:
                    matcher.fail("no token is allowed (bad_words, or logits that are not numbers)")
                elif not matcher.admits(token):
                    again.append(each)
            left = again
            if left:
                self._mask(pool, logits, left)
                rows = [row for row, _ in left]
                for row in rows:
                    logits[row, picked[row]] = -np.inf
                    self._draws[row, -1] = self.samplers[row].redraw()
                rules = [self._rules[row] for row in rows]
                tokens = ops.pick_tokens(pool, logits[rows], self._draws[rows], rules).tolist()
                for row, token in zip(rows, tokens, strict=True):
                    picked[row] = token


def needs_masks(params: SamplingParams) -> bool:
    """Whether a constraint's mask must be applied before a token is picked.

    Otherwise a token is picked from the model's distribution. Only if it is forbidden, another is picked from the
    masked distribution with the next random number. The probability of an allowed t is p(t) + (1 - A) p(t) / A = p(t) /
    A, with A the total of the allowed tokens, which is the masked distribution. If the most likely token is allowed, it
    is also the most likely allowed one. So most tokens need no mask. Filters cut differently after a mask, and log
    probabilities are of the masked distribution, so both need it first.
    """
    filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return params.logprobs is not None or (filters and params.temperature != 0.0)


class SpeculativePicks:
    """Tokens of a step with drafts, picked for all rows in one call as if every draft were accepted."""

    def __init__(self, pool: ops.ThreadPool, picked: list[int], logits: F32) -> None:
        self._pool, self._picked, self._logits = pool, picked, logits
        self._is_valid = True

    @classmethod
    def of(
        cls, pool: ops.ThreadPool, samplers: Sequence[Sampler], num_rows: Sequence[int], logits: F32
    ) -> SpeculativePicks | None:
        """Pick from all rows of `logits` (rows, vocabulary), `num_rows` of them per sampler: the token after a
        sequence's newest one, and the tokens after its drafts. No token is taken.

        None: a sampler's next pick depends on the token before, so each row must be picked after it was taken.
        """
        if not all(sampler.can_pick_ahead for sampler in samplers):
            return None
        draws = [
            sampler.numbers(num_later)
            for sampler, count in zip(samplers, num_rows, strict=True)
            for num_later in range(count)
        ]
        picked: list[int] = ops.pick_tokens(pool, logits, np.array(draws), [None] * len(draws)).tolist()
        return cls(pool, picked, logits)

    def take(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[int] | None:
        """The tokens of these rows, one per sampler, which takes it. None: they must be picked one by one."""
        if not self._is_valid:
            return None
        return [self._take(row, sampler) for row, sampler in zip(rows, samplers, strict=True)]

    def _take(self, row: int, sampler: Sampler) -> int:
        token, matcher = self._picked[row], sampler.matcher
        if matcher is not None:
            forced = matcher.forced
            if forced is not None:
                token = forced
            elif (token == 0 and self._logits[row, 0] == -np.inf) or not matcher.admits(token):
                self._is_valid = False  # another number is drawn, which moves those of later tokens
                return SamplerBatch([sampler]).pick(self._pool, self._logits[row : row + 1])[0]
        sampler.take(token)
        if matcher is not None:
            matcher.prepare()
        return token


def sample(pool: ops.ThreadPool, samplers: Sequence[Sampler], logits: F32) -> list[int]:
    """`SamplerBatch.pick` of one step."""
    return SamplerBatch(samplers).pick(pool, logits)


def logprobs(
    pool: ops.ThreadPool, logits: F32, rows: Sequence[int], tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probabilities of `tokens[i]` in row `rows[i]` of `logits` (any, vocabulary), and of the row's most likely
    ones."""
    answers = ops.log_probabilities(pool, logits, rows, tokens, num_top)
    return [
        # Tokens that a constraint forbids are not listed, however few are left.
        TokenLogprob(token, value, tuple(each for each in top if each[1] != -np.inf))
        for (token, value), *top in answers
    ]


def pick_undecided(
    pool: ops.ThreadPool,
    samplers: Sequence[Sampler],
    picked: Sequence[int],
    logits: Callable[[list[int]], F32],
) -> list[int]:
    """Complete a step sampled on a device: the host picks for rows that the device could not decide.

    Args:
        samplers: samplers of the step's rows.
        picked: a token per row, or a negative number for an undecided row.
        logits: logits of the given rows; called only if needed.
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
