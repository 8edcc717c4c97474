"""Compiles constraints and tracks which tokens may come next, using llguidance (`grammar_source`).

A grammar is bounded, tried in another process, compiled once and cached. Each answer has its own matcher. Slow masks
are computed on a separate thread while the model computes.
"""

from __future__ import annotations

import json
import logging
import re
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
from twofold.text.schemas.enforceable import enforceable_schema
from twofold.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

U32 = npt.NDArray[np.uint32]
MAX_BYTES: Final = 128 * 1024
"""Maximum size of a grammar's source."""
MAX_DEPTH: Final = 48
"""Maximum nesting depth of a JSON schema."""
_MAX_CACHED: Final = 16
"""Compiled grammars kept. Each takes 50 to 100 MB once requests have visited most of its states; most take 1 MB."""
_OFFLOAD_ABOVE_S: Final = 4e-4
"""Mask time per step below which the engine's thread computes the masks. Waking another thread beside the pool's
threads costs a step of the bundled model 0.1 ms on two cores. A mask of its 4,096 tokens takes 0.01 ms, one of 150,000
tokens 0.05 ms."""
MASK_TIMEOUT_S: Final = 10.0
"""Timeout of one mask computed on the other thread. Its work is bounded (`grammar_source.limits`) to 15 ms on a machine
that is not overloaded."""


class CompiledGrammar:
    """A compiled constraint. See `api.constraints.CompiledConstraint`."""

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        """matcher: at its initial state, `initial`; it is copied, never advanced."""
        self.constraint = constraint
        self.vocabulary = vocabulary
        self.initial = matcher
        self.first_mask = vocabulary.empty_mask()
        fill(matcher, self.first_mask)

    def start(self, masks_first: bool = True) -> Matcher:
        return Matcher(self, masks_first)


class Matcher:
    """Grammar state of one answer. See `api.constraints.TokenMatcher`."""

    forced: int | None = None
    """Always None: a grammar forces no token, even where only one is allowed."""

    def __init__(self, grammar: CompiledGrammar, masks_first: bool = True) -> None:
        self.masks_first = masks_first
        self.ended = False
        self.error: str | None = None
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.initial.deep_copy()
        self._mask = grammar.first_mask
        self._mask_job: MaskJob | None = None
        """The job that computes the mask."""
        self._is_stale = False
        """Whether the mask belongs to an earlier token."""
        self._admitted = -1
        """The token that the grammar has already taken."""

    def mask(self) -> U32:
        if self._mask_job is not None:
            self._vocabulary.masks.wait(self._mask_job)
            self._mask_job = None
        elif self._is_stale:
            self._is_stale = False
            self._vocabulary.masks.compute(MaskWork(self, self._matcher, self._mask))
        return self._mask

    def prepare(self) -> None:
        self._vocabulary.masks.begin()

    def admits(self, token: int) -> bool:
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
        if self.ended or self.error is not None:
            return
        if token in self._vocabulary.ends:
            self.ended = True
        elif self._admitted != token and not self._matcher.consume_token(token):
            self.fail(self._matcher.get_error())
        else:
            self._admitted = -1
            self._request_mask(self._matcher)

    def fail(self, reason: str) -> None:
        if self.error is None:
            field = self._grammar.constraint.field
            self.error = f"the answer cannot continue under {field}: {' '.join(reason.split())}"

    def _request_mask(self, matcher: LLMatcher) -> None:
        """After a token: end if the grammar is complete, else request the next mask."""
        if not matcher.is_stopped():
            if self._mask is self._grammar.first_mask:
                self._mask = self._vocabulary.empty_mask()
            if not self.masks_first:
                self._is_stale = True
                return
            self._mask_job = self._vocabulary.masks.request(MaskWork(self, matcher, self._mask))
        elif matcher.is_error():
            self.fail(matcher.get_error())
        else:
            self.ended = True


class MaskWork(NamedTuple):
    """Fill `mask` with the tokens that `matcher` allows for `owner`."""

    owner: Matcher
    matcher: LLMatcher
    mask: U32


class MaskJob:
    """The masks of a step."""

    def __init__(self) -> None:
        self.works: list[MaskWork] = []
        self.at = 0
        """Index of the mask being computed."""
        self.is_done = False
        self.done = threading.Lock()
        """Held until all masks are computed."""
        self.done.acquire()


class MaskThread:
    """Computes a step's masks beside the engine's thread if they take long. Only that thread may call it."""

    def __init__(self) -> None:
        self._mask_s = 1e-5
        """Time per mask, running mean."""
        self._next = MaskJob()
        self._start()

    def request(self, work: MaskWork) -> MaskJob:
        """Add one mask to the next step; `begin` starts computing them."""
        self._next.works.append(work)
        return self._next

    def begin(self) -> None:
        """Start the next step's masks after all were requested; fast ones are computed at once."""
        job = self._next
        if not job.works:
            return
        self._next = MaskJob()
        if len(job.works) * self._mask_s < _OFFLOAD_ABOVE_S:
            self._compute_all(job)
        else:
            self._jobs.put(job)

    def wait(self, job: MaskJob) -> None:
        """Wait until all masks are computed. A mask that takes too long is abandoned and its answer fails."""
        if job is self._next:
            self.begin()
        while not job.is_done:
            if job.done.acquire(timeout=MASK_TIMEOUT_S):
                job.done.release()
            else:
                self._abandon(job)

    def close(self) -> None:
        self._jobs.put(None)

    def _abandon(self, job: MaskJob) -> None:
        """Abandon the stuck thread; a new one computes the remaining masks."""
        stuck, rest = job.works[job.at], job.works[job.at + 1 :]
        stuck.owner.fail(
            f"the allowed next tokens took more than {MASK_TIMEOUT_S:.0f} s to compute; simplify the grammar"
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
        """Return False if the job was abandoned meanwhile."""
        works = job.works
        for at, work in enumerate(works):
            job.at = at
            began = time.perf_counter()
            self.compute(work)
            # A mask that visits new grammar states takes a hundred times as long and is no measure of the next one.
            self._mask_s += 0.05 * (min(time.perf_counter() - began, 1e-3) - self._mask_s)
            if job.works is not works:
                return False
        job.is_done = True
        job.done.release()
        return True

    def compute(self, work: MaskWork) -> None:
        """Compute one mask on the calling thread."""
        try:
            fill(work.matcher, work.mask)
            if work.matcher.is_error():
                work.owner.fail(work.matcher.get_error())
        except Exception as error:
            _log.exception("computing a token mask failed")
            work.owner.fail(str(error))


def fill(matcher: LLMatcher, mask: U32) -> None:
    """Write the allowed tokens into `mask`; the result is meaningless for a matcher in error. Releases the GIL."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Vocabulary:
    """A model's tokens in llguidance's form, and the thread that computes masks over them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: columns of the logits; columns without a token are never allowed."""
        from twofold.engine.grammar_source import TokenTable  # imports llguidance only when needed

        self.tokenizer = tokenizer
        self.ends = frozenset(token for token in tokenizer.eos_token_ids if token < vocab_size)
        # An added token's name may be text; a special token's name is not.
        special = sorted(token for token in tokenizer.special_token_ids | self.ends if token < vocab_size)
        tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        ends = sorted(self.ends)
        if not ends:  # a token beyond the logits: such an answer ends where the grammar has no continuation
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
    """Compiles constraints for one model and caches the newest. Thread-safe; loads nothing before the first use."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._cache: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._vocab_size)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a constraint. Blocks, for seconds where a grammar is large.

        Raises:
            RequestError: the grammar is too large, invalid, unsupported, or matches nothing.
            CapacityError: too many grammars are waiting to be compiled.
        """
        check_bounds(constraint)
        with self._lock:
            cached = self._cache.get(constraint)
            if cached is not None:
                self._cache.move_to_end(constraint)
                return cached
            vocabulary = self._vocabulary
        compiled = self._compile(constraint, vocabulary)
        with self._lock:
            self._cache[constraint] = compiled
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def close(self) -> None:
        with self._lock:
            if "_vocabulary" in self.__dict__:
                self._vocabulary.close()

    def _compile(self, constraint: Constraint, vocabulary: Vocabulary) -> CompiledGrammar:
        from twofold.engine import grammar_source

        source = _source(constraint)
        if _is_endless(constraint):
            raise _refusal(
                constraint, "it is endless: every match contains another match, so no answer is finite"
            )
        matcher = None
        error = vocabulary.trial.error_of(source)
        if not error:
            matcher, error = grammar_source.compiled(vocabulary.tokens, source)
        if error or matcher is None:
            _refuse_part(constraint, vocabulary.trial)
            reason = _without_source(error) if constraint.parts else error
            raise _refusal(constraint, reason, quotes=True)
        return CompiledGrammar(constraint, vocabulary, matcher)


def _source(constraint: Constraint) -> str:
    """The grammar in llguidance's form. Raises RequestError."""
    from twofold.engine import grammar_source

    try:
        return grammar_source.grammar_of(
            constraint.kind, _enforceable_text(constraint), constraint.whitespace_pattern, constraint.frame
        )
    except ValueError as wrong:
        raise _refusal(constraint, str(wrong), quotes=True) from None


def _enforceable_text(constraint: Constraint) -> str:
    """The constraint's text, a schema as the library can follow it. ValueError if it cannot."""
    if constraint.kind != "json_schema":
        return constraint.text
    try:
        schema = json.loads(constraint.text)
    except ValueError:
        return constraint.text  # which `grammar_of` refuses
    return json.dumps(enforceable_schema(schema) if isinstance(schema, dict | bool) else schema)


def _refuse_part(constraint: Constraint, trial: GrammarTrial) -> None:
    """Raises RequestError if one of the schemas that a grammar was made from fails alone."""
    for field, tool, text in constraint.parts:
        part = Constraint("json_schema", text, field=field)
        error = trial.error_of(_source(part))
        if error:
            where = f"{field}: {tool}" if tool else field
            reason = f": {_without_source(error)}"
            raise RequestError(f"{where}: the schema cannot be used{reason}", param=field, private=reason)


def _without_source(error: str) -> str:
    """llguidance's error message without its place in a grammar that the client did not write, and its text."""
    return re.sub(r"^at \d+\(\d+\): |\s*\d+ \| .*$", "", error)


def check_bounds(constraint: Constraint) -> None:
    """Raises RequestError for a constraint that is too large to parse."""
    size = len((constraint.text + (constraint.frame or "")).encode(errors="replace"))
    if size > MAX_BYTES:
        raise _refusal(constraint, f"it has {size} bytes; at most {MAX_BYTES} are accepted")
    if not constraint.text:
        raise _refusal(constraint, "it is empty")
    if constraint.kind == "json_schema" and (depth := _depth(constraint.text)) > MAX_DEPTH:
        raise _refusal(constraint, f"it is nested {depth} levels deep; at most {MAX_DEPTH} are accepted")


def _is_endless(constraint: Constraint) -> bool:
    if constraint.kind == "json_schema":
        return is_endless_schema(json.loads(constraint.text)) or is_endless_lark(constraint.frame or "")
    return constraint.kind == "grammar" and is_endless_lark(constraint.text)


def _depth(text: str) -> int:
    """Nesting depth of a JSON text; 0 if it is not JSON."""
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


def _refusal(constraint: Constraint, reason: str, *, quotes: bool = False) -> RequestError:
    """quotes: the reason repeats parts of the constraint."""
    return RequestError(
        f"{constraint.field}: the {constraint.kind.replace('_', ' ')} cannot be used: {reason}",
        param=constraint.field,
        private=f": {reason}" if quotes else "",
    )
