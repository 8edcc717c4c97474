"""Discrete-event simulation of a fleet: requests arrive, a router chooses a replica, replicas batch continuously.

A replica is what the engine's scheduler does with time: each step computes one token of every decoding sequence and
chunks of prompts up to a token budget, and takes as long as `StepTimes` says. The router is the fleet's own choice.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.server.fleet.choice import ReplicaLoad, ranked

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arrival:
    """One request of the load."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found where `follows` was computed."""
    follows: int | None = None
    """Number of the earlier turn of its conversation."""


@dataclass(frozen=True)
class StepTimes:
    """Time of one engine step: base + decode · sequences + prefill · prompt tokens, in seconds."""

    base_s: float
    decode_s: float
    prefill_s: float

    def seconds(self, num_decode: int, num_prefill: int) -> float:
        return self.base_s + self.decode_s * num_decode + self.prefill_s * num_prefill

    @classmethod
    def fitted(cls, num_decode: F64, num_prefill: F64, seconds: F64, *, is_exact: bool = False) -> StepTimes:
        """Least squares over steps, without negative terms.

        Measured times have long tails, and a queue feels their mean, so errors count in seconds. is_exact: for times
        without noise, errors count relative to the time. ConfigError for too few steps.
        """
        if len(seconds) < 3 or not np.all(seconds > 0):
            raise ConfigError(
                f"{len(seconds)} measured steps were given; at least 3 are needed, each longer than 0 s"
            )
        scale = seconds if is_exact else np.ones(len(seconds))
        terms = np.stack([np.ones(len(seconds)), num_decode, num_prefill], axis=1) / scale[:, None]
        kept = [column for column in range(3) if np.any(terms[:, column])]
        while True:
            solved, *_ = np.linalg.lstsq(terms[:, kept], seconds / scale, rcond=None)
            if np.all(solved >= 0) or len(kept) == 1:
                break
            kept.pop(int(np.argmin(solved)))
        found = np.zeros(3)
        found[kept] = solved
        return cls(*found.tolist())


@dataclass(frozen=True)
class ReplicaLimits:
    """Limits of one replica, by the engine's settings."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_tokens: int = 1 << 30
    """Tokens for which the KV cache has pages."""


@dataclass(frozen=True)
class Served:
    """Times of one request, seconds after its arrival."""

    replica: int
    ttft_s: float
    e2e_s: float
    output_tokens: int

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


@dataclass
class _Sequence:
    number: int
    left_prefill: int
    left_output: int
    num_tokens: int
    """KV-cache tokens at its end."""


@dataclass
class _Replica:
    times: StepTimes
    limits: ReplicaLimits
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    labels: set[bytes] = field(default_factory=set)
    kv_tokens: int = 0
    prefills: list[tuple[_Sequence, int]] = field(default_factory=list)
    """The step under way: prompt tokens by sequence."""
    decoding: list[_Sequence] = field(default_factory=list)
    is_busy: bool = False

    @property
    def num_ongoing(self) -> int:
        return len(self.waiting) + len(self.running)

    def begin_step(self) -> float | None:
        """Choose the step's tokens; its seconds, or None without work."""
        limits = self.limits
        while self.waiting and len(self.running) < limits.max_num_seqs:
            needed = self.waiting[0].num_tokens
            if self.running and self.kv_tokens + needed > limits.kv_tokens:
                break
            self.kv_tokens += needed
            self.running.append(self.waiting.popleft())
        self.decoding = [each for each in self.running if not each.left_prefill]
        room = max(0, limits.max_num_batched_tokens - len(self.decoding))
        self.prefills = []
        for sequence in self.running:
            if sequence.left_prefill and room:
                tokens = min(room, sequence.left_prefill)
                self.prefills.append((sequence, tokens))
                room -= tokens
        self.is_busy = bool(self.running)
        if not self.is_busy:
            return None
        return self.times.seconds(len(self.decoding), sum(tokens for _, tokens in self.prefills))

    def end_step(self) -> tuple[list[_Sequence], list[_Sequence]]:
        """(sequences that got their first token, sequences that are finished)."""
        first = []
        for sequence, tokens in self.prefills:
            sequence.left_prefill -= tokens
            if not sequence.left_prefill:
                sequence.left_output -= 1
                first.append(sequence)
        for sequence in self.decoding:
            sequence.left_output -= 1
        ended = [each for each in self.running if each.left_output <= 0 and not each.left_prefill]
        self.running = [each for each in self.running if each.left_output > 0 or each.left_prefill]
        self.kv_tokens -= sum(each.num_tokens for each in ended)
        return first, ended


def simulate_fleet(
    arrivals: Sequence[Arrival],
    replicas: Sequence[StepTimes],
    limits: ReplicaLimits,
    *,
    overhead_s: float = 0.0,
    seed: int = 0,
) -> list[Served]:
    """Times of every request, in the order of `arrivals`, which ascend in time.

    overhead_s: of router and HTTP, added to every first token.
    """
    members = [_Replica(times, limits) for times in replicas]
    random = Random(seed)  # noqa: S311 (spreads load, as the router does)
    chosen = [0] * len(arrivals)
    first_s, ended_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    events: list[tuple[float, int, int]] = [(each.at_s, 1, number) for number, each in enumerate(arrivals)]
    heapq.heapify(events)

    def begin(index: int, now_s: float) -> None:
        seconds = members[index].begin_step()
        if seconds is not None:
            heapq.heappush(events, (now_s + seconds, 0, index))

    while events:
        now_s, is_arrival, number = heapq.heappop(events)
        if not is_arrival:
            first, ended = members[number].end_step()
            for sequence in first:
                first_s[sequence.number] = now_s
            for sequence in ended:
                ended_s[sequence.number] = now_s
            begin(number, now_s)
            continue
        index = chosen[number] = _routed(arrivals, number, members, random)
        members[index].waiting.append(_sequence(arrivals[number], number, members[index]))
        members[index].labels.add(_label(number))
        if not members[index].is_busy:
            begin(index, now_s)
    return [
        Served(
            chosen[number],
            first_s[number] - each.at_s + overhead_s,
            ended_s[number] - each.at_s + overhead_s,
            each.output_tokens,
        )
        for number, each in enumerate(arrivals)
    ]


def _routed(arrivals: Sequence[Arrival], number: int, members: Sequence[_Replica], random: Random) -> int:
    follows = arrivals[number].follows
    labels = () if follows is None else (_label(follows),)
    loads = {
        index: ReplicaLoad(each.labels, each.num_ongoing, min(1.0, each.kv_tokens / each.limits.kv_tokens))
        for index, each in enumerate(members)
    }
    return ranked(labels, loads, random)[0][0]


def _sequence(arrival: Arrival, number: int, replica: _Replica) -> _Sequence:
    is_found = arrival.follows is None or _label(arrival.follows) in replica.labels
    cached = min(arrival.cached_tokens if is_found else 0, arrival.prompt_tokens - 1)
    tokens = arrival.prompt_tokens + arrival.output_tokens
    return _Sequence(number, arrival.prompt_tokens - cached, arrival.output_tokens, tokens)


def _label(number: int) -> bytes:
    return number.to_bytes(8, "little")
