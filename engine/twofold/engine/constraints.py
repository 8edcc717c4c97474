"""Constraints compiled and followed: which tokens may come next, by llguidance (`grammar_source`).

A grammar is bounded, tried in another process, compiled once and kept; each answer follows it with a matcher of its
own. Masks that take long are computed on a thread of their own while the model computes.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from base64 import b64encode
from collections import OrderedDict
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.api.constraints import Constraint
from twofold.api.errors import RequestError
from twofold.engine.endless_grammars import is_endless_lark, is_endless_schema
from twofold.engine.grammar_trial import GrammarTrial
from twofold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

U32 = npt.NDArray[np.uint32]
MAX_BYTES: Final = 128 * 1024
"""Of a grammar's text."""
MAX_DEPTH: Final = 48
"""Of a schema's JSON, in levels."""
_KEPT: Final = 16
"""Compiled grammars; each has up to 50 to 100 MB where requests have gone through most of its states, and mostly 1."""
_HAND_OVER_S: Final = 4e-4
"""A step's masks that take less are computed by the engine's thread. To wake another one beside the pool's threads
costs a step of the bundled model 0.1 ms on two cores; a mask of its 4,096 tokens takes 0.01 ms, one of 150,000 takes
0.05 ms."""
MASK_TIMEOUT_S: Final = 10.0
"""For one mask that is computed elsewhere. Its work is bounded (`grammar_source.limits`): 15 ms, on a machine that is
not overloaded."""


class CompiledGrammar:
    """A constraint's grammar, ready to be followed. See `api.constraints.CompiledConstraint`."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        """matcher: at its beginning; it is copied, never moved."""
        self.constraint = constraint
        self.vocabulary = vocabulary
        self._matcher = matcher
        self.first_mask = vocabulary.empty_mask()
        fill(matcher, self.first_mask)

    def matcher(self) -> LLMatcher:
        """At the grammar's beginning."""
        return self._matcher.deep_copy()

    def start(self, masks_first: bool = True) -> Matcher:
        return Matcher(self, masks_first)


class Matcher:
    """One answer on its way through its grammar. See `api.constraints.TokenMatcher`."""

    def __init__(self, grammar: CompiledGrammar, masks_first: bool = True) -> None:
        self.masks_first = masks_first
        self.ended = False
        self.error: str | None = None
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        self._mask = grammar.first_mask
        self._asked: MaskJob | None = None
        """Where the mask is computed."""
        self._is_stale = False
        """The mask is of an earlier token."""
        self._admitted = -1
        """The token that the grammar has taken already."""

    def mask(self) -> U32:
        """See `TokenMatcher.mask`."""
        if self._asked is not None:
            self._vocabulary.masks.wait(self._asked)
            self._asked = None
        elif self._is_stale:
            self._is_stale = False
            self._vocabulary.masks.now(MaskWork(self, self._matcher, self._mask))
        return self._mask

    def prepare(self) -> None:
        """See `TokenMatcher.prepare`."""
        self._vocabulary.masks.begin()

    def admits(self, token: int) -> bool:
        """See `TokenMatcher.admits`."""
        if self.error is not None:
            return True
        if token in self._vocabulary.ends:
            return bool(self.mask()[token // 32] >> token % 32 & 1)
        if self._matcher.try_consume_tokens([token]):
            self._admitted = token
            return True
        if self._matcher.is_error():
            self.fail(self._matcher.get_error())
        return self.error is not None

    def take(self, token: int) -> None:
        """See `TokenMatcher.take`."""
        if self.ended or self.error is not None:
            return
        if token in self._vocabulary.ends:
            self.ended = True
        elif self._admitted != token and not self._matcher.consume_token(token):
            self.fail(self._matcher.get_error())
        else:
            self._admitted = -1
            self._go_on(self._matcher)

    def fail(self, reason: str) -> None:
        """See `TokenMatcher.fail`."""
        if self.error is None:
            self.error = f"the answer cannot go on as {self._grammar.constraint.field} asks: {' '.join(reason.split())}"

    def _go_on(self, matcher: LLMatcher) -> None:
        """The grammar has taken a token: it is complete, or its next mask is asked for."""
        if not matcher.is_stopped():
            if self._mask is self._grammar.first_mask:
                self._mask = self._vocabulary.empty_mask()
            if not self.masks_first:
                self._is_stale = True
                return
            self._asked = self._vocabulary.masks.ask(MaskWork(self, matcher, self._mask))
        elif matcher.is_error():
            self.fail(matcher.get_error())
        else:
            self.ended = True


class MaskWork(NamedTuple):
    """Fill `mask` with what `matcher` allows `owner`."""

    owner: Matcher
    matcher: LLMatcher
    mask: U32


class MaskJob:
    """The masks of a step."""

    def __init__(self) -> None:
        self.works: list[MaskWork] = []
        self.at = 0
        """The one that is being computed."""
        self.is_done = False
        self.done = threading.Lock()
        """Held until all are computed."""
        self.done.acquire()


class MaskThread:
    """Computes a step's masks while the engine's thread goes on, if they take long. All calls are that thread's."""

    def __init__(self) -> None:
        self._mask_s = 1e-5
        """What a mask takes, as a running mean."""
        self._next = MaskJob()
        self._start()

    def ask(self, work: MaskWork) -> MaskJob:
        """One mask of the next step; `begin` has them computed."""
        self._next.works.append(work)
        return self._next

    def begin(self) -> None:
        """All masks of the next step have been asked for: those that take little are computed now."""
        job = self._next
        if not job.works:
            return
        self._next = MaskJob()
        if len(job.works) * self._mask_s < _HAND_OVER_S:
            self._compute_all(job)
        else:
            self._jobs.put(job)

    def now(self, work: MaskWork) -> None:
        """One mask, on this thread."""
        self._compute(work)

    def wait(self, job: MaskJob) -> None:
        """Until all masks are computed. One that takes too long is given up: its answer fails."""
        if job is self._next:
            self.begin()
        while not job.is_done:
            if job.done.acquire(timeout=MASK_TIMEOUT_S):
                job.done.release()
            else:
                self._give_up(job)

    def close(self) -> None:
        self._jobs.put(None)

    def _give_up(self, job: MaskJob) -> None:
        """The thread does not come back; another one computes the masks behind."""
        stuck, rest = job.works[job.at], job.works[job.at + 1 :]
        stuck.owner.fail(
            f"what may come next is not known after {MASK_TIMEOUT_S:.0f} s; simplify the grammar"
        )
        self._jobs.put(None)
        self._start()
        job.works, job.at = rest, 0
        self._jobs.put(job)

    def _start(self) -> None:
        self._jobs: SimpleQueue[MaskJob | None] = SimpleQueue()
        threading.Thread(target=self._serve, args=(self._jobs,), name="twofold-masks", daemon=True).start()

    def _serve(self, jobs: SimpleQueue[MaskJob | None]) -> None:
        while (job := jobs.get()) is not None:
            if not self._compute_all(job):
                return

    def _compute_all(self, job: MaskJob) -> bool:
        """False: the job was given up meanwhile."""
        works = job.works
        for at, work in enumerate(works):
            job.at = at
            began = time.perf_counter()
            self._compute(work)
            # One that needs states which nobody needed before takes a hundred times as long, and says little.
            self._mask_s += 0.05 * (min(time.perf_counter() - began, 1e-3) - self._mask_s)
            if job.works is not works:
                return False
        job.is_done = True
        job.done.release()
        return True

    def _compute(self, work: MaskWork) -> None:
        try:
            fill(work.matcher, work.mask)
            if work.matcher.is_error():
                work.owner.fail(work.matcher.get_error())
        except Exception as error:
            _log.exception("a mask could not be computed")
            work.owner.fail(str(error))


def fill(matcher: LLMatcher, mask: U32) -> None:
    """What may come next, into `mask`; of a matcher in error nothing that counts. Releases the interpreter's lock."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Vocabulary:
    """A model's tokens as llguidance knows them, and the thread that computes masks over them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: columns of the logits; those without a token never come."""
        from twofold.engine.grammar_source import TokenTable  # llguidance, for who needs it

        self.tokenizer = tokenizer
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < vocab_size)
        # An added token's name may be text, a special token's is none.
        special = sorted(token for token in tokenizer.special_token_ids | self.ends if token < vocab_size)
        tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        ends = sorted(self.ends)
        if (
            not ends
        ):  # one that no row of logits has: such an answer ends where the grammar has no continuation
            ends = [vocab_size]
            tokens.append(b"")
        self._tokens = tokens
        self.tokens: LLTokenizer = TokenTable(tokens, special).compiled(ends)
        self.trial = GrammarTrial(
            {"tokens": [b64encode(token).decode() for token in tokens], "special": special, "eos": ends}
        )
        self.masks = MaskThread()

    def empty_mask(self) -> U32:
        return np.zeros(-(-len(self._tokens) // 32), np.uint32)

    def close(self) -> None:
        self.masks.close()
        self.trial.close()


class GrammarCompiler:
    """Compiles constraints for one model and keeps the newest. Thread-safe; nothing is loaded before the first."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Blocks, for seconds where a grammar is large.

        Raises:
            RequestError: it is too large, no grammar, not supported, or nothing can match it.
            CapacityError: too many grammars wait to be compiled.
        """
        check_bounds(constraint)
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept
            vocabulary = self._vocabulary
        made = self._compiled(constraint, vocabulary)
        with self._lock:
            self._kept[constraint] = made
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        with self._lock:
            if "_vocabulary" in self.__dict__:
                self._vocabulary.close()

    def _compiled(self, constraint: Constraint, vocabulary: Vocabulary) -> CompiledGrammar:
        from twofold.engine import grammar_source

        try:
            source = grammar_source.grammar_of(
                constraint.kind, constraint.text, constraint.whitespace_pattern, constraint.frame
            )
        except ValueError as wrong:
            raise _refusal(constraint, str(wrong)) from None
        if _is_endless(constraint):
            raise _refusal(constraint, "it can never end: whatever matches it holds another such thing")
        matcher = None
        error = vocabulary.trial.error_of(source)
        if not error:
            matcher, error = grammar_source.compiled(vocabulary.tokens, source)
        if error or matcher is None:
            raise _refusal(constraint, error)
        return CompiledGrammar(constraint, vocabulary, matcher)


def check_bounds(constraint: Constraint) -> None:
    """Raises RequestError for what is too large to be looked at."""
    size = len((constraint.text + (constraint.frame or "")).encode(errors="replace"))
    if size > MAX_BYTES:
        raise _refusal(constraint, f"it has {size} bytes; at most {MAX_BYTES} are taken")
    if not constraint.text:
        raise _refusal(constraint, "it is empty")
    if constraint.kind == "json_schema" and (depth := _depth(constraint.text)) > MAX_DEPTH:
        raise _refusal(constraint, f"it is nested {depth} levels deep; at most {MAX_DEPTH} are taken")


def _is_endless(constraint: Constraint) -> bool:
    if constraint.kind == "json_schema":
        return is_endless_schema(json.loads(constraint.text)) or is_endless_lark(constraint.frame or "")
    return constraint.kind == "grammar" and is_endless_lark(constraint.text)


def _depth(text: str) -> int:
    """Levels of a JSON text. 0 for what is none."""
    try:
        level = [json.loads(text)]
    except (ValueError, RecursionError):
        return 0 if text.count("[") + text.count("{") < MAX_DEPTH else MAX_DEPTH + 1
    depth = 0
    while level := [
        held
        for value in level
        if isinstance(value, dict | list)
        for held in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
    return depth


def _refusal(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(
        f"{constraint.field}: the {constraint.kind.replace('_', ' ')} cannot be used: {reason}",
        param=constraint.field,
    )
