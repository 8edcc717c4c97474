"""An engine without a model, for faults that a real one will not produce on demand.

Speaks the protocol of `twofold.server.bridge.models.protocol`: words as tokens, the prompt said back, one word per turn
of its thread, with log probabilities that the token's id gives. `fail_on_submit`, `fail_after_words` and `hold` inject
errors and a computation that does not end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from twofold.api.config import EngineConfig
from twofold.api.constraints import CompiledConstraint, Constraint, TokenMatcher
from twofold.api.errors import CapacityError, RequestError
from twofold.api.pooling import ModelPooling, Pooling
from twofold.api.types import (
    Chunk,
    EngineFailure,
    EngineStats,
    GenerationRequest,
    MappedWeights,
    PlacementCounts,
    RequestProgress,
    RunInfo,
    SpeculationCounts,
    TokenLogprob,
    Usage,
)
from twofold.telemetry.sink import LoadSample, TelemetrySink
from twofold.text.tokenizer import ToolForm

EMULATED = RunInfo(
    model="/models/fake-tales",
    architecture="FakeForCausalLM",
    accelerator="emulated:rtx4090-pcie4",
    accelerator_reason="asked for",
    clock="virtual",
    policy="lru",
    num_layers=2,
    num_experts=4,
    top_k=2,
    num_slots=2,
    expert_bytes=1024,
    cpu_isa="generic",
    cpu_threads=1,
    version="0",
    config_json="{}",
)


class WordTokenizer:
    """Token id n is the n-th word it ever saw."""

    def __init__(self) -> None:
        self.rendered: tuple[list[dict[str, Any]], Any] = ([], None)
        """Last input of the template: messages and tools."""
        self._words: list[str] = []
        self._lock = threading.Lock()

    def segments(self, text: str) -> list[str]:
        return [text]

    def literal(self, text: str) -> str:
        return text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        with self._lock:
            ids = []
            for word in text.split():
                if word not in self._words:
                    self._words.append(word)
                ids.append(self._words.index(word))
            return ids

    def word(self, token_id: int) -> str:
        return self._words[token_id] if token_id < len(self._words) else f"<{token_id}>"

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.word(token_id) + " " for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f"{self.word(token_id)} ".encode()

    def token_id(self, token: str) -> int | None:
        return None

    special_token_ids: frozenset[int] = frozenset()
    template_variables: frozenset[str] = frozenset({"mood", "reasoning_effort", "tools"})
    chat_template: str | None = "{{ messages }}"
    tool_form: ToolForm | None = ToolForm(arguments_as_text=False, null_content=False, several=True)

    turn_end: str | None = None

    def shows(self, *shape: str) -> str:
        """As a template that takes roles in any order."""
        return "shown"

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Renders the messages' words; other request settings become words before and after them."""
        self.rendered = list(messages), tools
        if messages[0]["content"] == "refuse me":
            raise RequestError("the chat template refused the conversation: refused", param="messages")
        before = [f"{name}={variables[name]}" for name in sorted(self.template_variables & variables.keys())]
        after = [] if add_generation_prompt else ["CONTINUE" if continue_final_message else "OPEN"]
        return "\n".join([*before, *(message["content"] or "" for message in messages), *after])


def fake_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """The token is the second likeliest: the next id is likelier by 0.125, the ids after it less and less likely."""
    own = -0.25 * (token_id % 8 + 1)
    ranked = [(token_id + 1, own + 0.125), (token_id, own)]
    ranked += [(token_id + place, own - place) for place in range(2, num_top)]
    return TokenLogprob(token_id, own, tuple(ranked[:num_top]))


def fake_vector(prompt: Sequence[int], pooling: Pooling) -> npt.NDArray[np.float32]:
    """Number of tokens, first and last one; or how much each of the asked tokens is above the last one."""
    if pooling.tokens:
        return np.array([token - prompt[-1] for token in pooling.tokens], np.float32)
    vector = np.array([len(prompt), prompt[0], prompt[-1]][: pooling.dimensions], np.float32)
    return vector / np.float32(np.linalg.norm(vector)) if pooling.normalise else vector


@dataclass(frozen=True)
class FakeCompiled:
    """A constraint that is not enforced."""

    constraint: Constraint

    def start(self, masks_first: bool = True) -> TokenMatcher:
        raise AssertionError("the fake engine follows no grammar")


class FakeControl:
    """Nothing can be changed of it but that it sleeps."""

    def __init__(self, requests: Callable[[], list[RequestProgress]]) -> None:
        self.asleep = False
        self.requests = requests


class NoAdapters:
    """An engine's adapters, of which there are none."""

    scales: tuple[tuple[str, float], ...] = ()

    def known(self) -> list[Any]:
        return []


class FakeEngine:
    """Says the prompt's words back, one per turn."""

    def __init__(self, *, max_context: int = 64, max_running: int = 4, info: RunInfo = EMULATED) -> None:
        self.tokenizer = WordTokenizer()
        self.info = info
        self.max_context = max_context
        self.pooling = ModelPooling(size=3)
        self.mapped_weights: MappedWeights | None = None
        self.pictures = None
        self.failure: EngineFailure | None = None
        self.config = EngineConfig(max_num_seqs=max_running)
        self.control = FakeControl(self._live_requests)
        self.recording = object()
        self.adapters = NoAdapters()
        self.speculation: SpeculationCounts | None = None
        self.speculates = False
        self.fail_on_submit: Exception | None = None
        self.is_full = False
        self.rotates = False
        """Answers begin with the prompt's word number `seed`."""
        self.says: list[str] | None = None
        """Pieces that every answer consists of, whatever the prompt."""
        self.fail_after_words: int | None = None
        self.stopped_by: str | None = None
        """Stop string that answers report."""
        self.hold = threading.Event()
        """Cleared: running answers stand still after their first word."""
        self.hold.set()
        self.idle = threading.Event()
        self.started = threading.Event()
        """Set by the first word of any answer."""
        self.cancelled: list[str] = []
        self.requests: list[GenerationRequest] = []
        self._running: dict[str, Callable[[], bool]] = {}
        self._num_sent: dict[str, int] = {}
        self._queue: deque[GenerationRequest] = deque()
        self._changed = threading.Condition()
        self._draining = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        return FakeCompiled(constraint)

    def check_room(self) -> None:
        if self.is_full:
            raise CapacityError("full")

    def submit(self, request: GenerationRequest) -> None:
        if self.fail_on_submit is not None:
            raise self.fail_on_submit
        with self._changed:
            if self._draining:
                raise CapacityError("the engine is draining", draining=True)
            if len(self._running) >= self.config.max_num_seqs:
                raise CapacityError("all places are taken; try again later", retry_after_s=2.5)
            self.requests.append(request)
            self._num_sent[request.request_id] = 0
            self._running[request.request_id] = self._turns(request)
            self.idle.clear()
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _live_requests(self) -> list[RequestProgress]:
        numbered = enumerate(self.requests)
        return [
            RequestProgress(
                request,
                number,
                request.sampling.max_tokens or 0,
                True,
                len(request.prompt_token_ids),
                self._num_sent[request.request_id],
            )
            for number, request in numbered
            if request.request_id in self._running
        ]

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=0,
            num_free_pages=3,
            num_pages=4,
            num_free_records=0,
            num_records=0,
            num_steps=6,
            decode_tokens_per_s=0.0,
            clock=self.info.clock,
            placement=PlacementCounts(hits=30, cpu_misses=20, fetched=10),
            prefetch={"used": 0, "late": 4},
            speculation=self.speculation,
            draining=self._draining,
            prefix_cache_queries=9,
            prefix_cache_hits=7,
            num_preemptions=5,
            step_tokens={1: 3, 9: 2, 40000: 1},
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the fake engine did not end"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._running)
                if self._closed:
                    return
                for request_id, turn in list(self._running.items()):
                    if turn():
                        del self._running[request_id]
                if not self._running:
                    self.idle.set()
                self._changed.notify_all()
                if not self.hold.is_set():
                    # Cancelling, closing and releasing all notify; the timeout only bounds a lost wake-up.
                    self._changed.wait(0.02)

    def _turns(self, request: GenerationRequest) -> Callable[[], bool]:
        """A function that says the next word and tells whether it was the last."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        limit = len(prompt) if sampling.max_tokens is None else min(len(prompt), sampling.max_tokens)
        begin = (sampling.seed or 0) if self.rotates else 0
        num_sent = 0
        begun = False

        def say(text: str, token_ids: tuple[int, ...], reason: Any = None, error: str | None = None) -> bool:
            nonlocal begun
            usage = Usage(
                len(prompt),
                num_sent,
                0.0,
                0.25,
                0.5,
                self.info.clock,
                len(prompt) - 1,
                wall_s=(0.25, 0.5, 1.5),
                max_tokens=sampling.max_tokens or self.max_context,
            )
            logprobs, of_prompt = (), None
            if sampling.logprobs is not None:
                logprobs = tuple(fake_logprob(token_id, sampling.logprobs) for token_id in token_ids)
            if sampling.prompt_logprobs is not None and not begun:
                requested = sampling.prompt_logprobs
                of_prompt = (None, *(fake_logprob(token_id, requested) for token_id in prompt[1:]))
            begun = True
            request.on_chunk(
                Chunk(
                    text,
                    token_ids,
                    reason,
                    usage if reason else None,
                    error,
                    logprobs=logprobs,
                    prompt_logprobs=of_prompt,
                    stopped_by=self.stopped_by if reason else None,
                    pooled=fake_vector(prompt, request.pooling) if request.pooling else None,
                )
            )
            if request.after_step is not None:
                request.after_step()
            return reason is not None

        def turn() -> bool:
            nonlocal num_sent
            if request.request_id in self.cancelled:
                return say("", (), "cancelled")
            if request.pooling is not None:
                return self.hold.is_set() and say("", (), "stop")
            if self.fail_after_words is not None and num_sent >= self.fail_after_words:
                return say("", (), "error", "the native code failed in layer 3")
            if num_sent >= 1 and not self.hold.is_set():
                return False
            if self.says is not None:
                num_sent += 1
                return (
                    say(self.says[num_sent - 1], (num_sent,))
                    if num_sent <= len(self.says)
                    else say("", (), "stop")
                )
            if num_sent >= limit:
                return say("", (), "length" if limit < len(prompt) else "stop")
            token_id = prompt[(begin + num_sent) % len(prompt)]
            num_sent += 1
            self._num_sent[request.request_id] = num_sent
            self.started.set()
            if token_id in sampling.stop_token_ids and num_sent > sampling.min_tokens:
                return say("", (token_id,), "stop")
            say(self.tokenizer.word(token_id) + " ", (token_id,))
            return num_sent >= limit and say("", (), "length" if limit < len(prompt) else "stop")

        return turn


class ListSink(TelemetrySink):
    """Keeps the load samples it is given."""

    def __init__(self) -> None:
        self.rows: list[LoadSample] = []

    def load_samples(self, rows: list[LoadSample]) -> None:
        self.rows += rows
