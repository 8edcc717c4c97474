"""Gain and cost of the prefix cache: the first token of a second turn, and requests without cache hits.

    python -m benchmarks.prefix_cache [--model MODEL] [--prompt-tokens 4000] [--rounds 5] [--overhead-seconds 40]

Each round answers a new conversation of that many tokens, then a short follow-up question. Prompts without a common
prefix run with and without the cache, in turn, on one engine. Scheduling is also timed alone, without a model.
Prints one JSON object; times are medians in wall-clock seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.kv_cache import PagePool
from twofold.engine.prefix.cache import CachingPool
from twofold.engine.scheduler import Scheduler
from twofold.models.bundled import bundled_model_path
from twofold.step.sequences import Sequence

_QUESTION_TOKENS: Final = 24
_ANSWER_TOKENS: Final = 32


def ask(engine: Engine, prompt: Seq[int], num_tokens: int) -> tuple[list[int], float, float, int]:
    """(answer, seconds to its first token, seconds of all, tokens found)."""
    chunks: list[Chunk] = []
    times: list[float] = []

    def on_chunk(chunk: Chunk) -> None:
        chunks.append(chunk)
        times.append(time.perf_counter())

    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    ends = (len(prompt) - 4,)  # as the server says it of a chat
    begun = time.perf_counter()
    engine.submit(GenerationRequest(tuple(prompt), sampling, on_chunk, "bench", turn_ends=ends))
    while engine.step():
        pass
    usage = chunks[-1].usage
    if usage is None or chunks[-1].error:
        raise RuntimeError(chunks[-1].error or "the answer has no usage")
    first = next(at for at, chunk in zip(times, chunks, strict=True) if chunk.token_ids)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    return tokens, first - begun, times[-1] - begun, usage.cached_tokens


def second_turns(engine: Engine, length: int, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    """Times of second turns, in conversations without a common prefix."""
    firsts, seconds, cached = [], [], []
    for _ in range(rounds):
        prompt = _prompt(engine, length, rng)
        answer, first_s, _, _ = ask(engine, prompt, _ANSWER_TOKENS)
        question = _prompt(engine, _QUESTION_TOKENS, rng)
        _, second_s, _, found = ask(engine, [*prompt, *answer, *question], 2)
        firsts.append(first_s)
        seconds.append(second_s)
        cached.append(found)
    first, second = statistics.median(firsts), statistics.median(seconds)
    return {"first_s": first, "second_s": second, "share": second / first, "cached_tokens": min(cached)}


def never_found(engine: Engine, lengths: Seq[int], seconds: float, rng: np.random.Generator) -> Any:
    """Prefill and decode time with the cache relative to without it, and the standard error, by prompt length.

    One engine runs with either pool in random order: two engines would differ by where their weights lie. One pool
    overwrites what the other keeps, which has no effect because no prompt ever hits the cache.
    """
    caching = engine._pool
    plain = PagePool(caching.num_pages, caching.page_size, caching.num_records or None)
    ratios = {}
    for length in lengths:
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds / len(lengths):
            for with_cache in rng.permutation([True, False]).tolist():
                engine._pool = engine._scheduler._pool = caching if with_cache else plain
                _, first_s, total_s, found = ask(engine, _prompt(engine, length, rng), _ANSWER_TOKENS)
                assert found == 0, "a drawn prompt was found"
                times[with_cache].append((first_s, total_s - first_s))
        engine._pool = engine._scheduler._pool = caching
        (with_ttft, with_decode), (ttft, decode) = (
            np.array(times[with_cache]).T for with_cache in (True, False)
        )
        ratios[length] = {
            "prefill": _ratio(with_ttft, ttft),
            "decode": _ratio(with_decode, decode),
            "pairs": len(ttft),
        }
    return ratios


def _ratio(with_cache: Any, without: Any) -> dict[str, float]:
    """The median of pairs, and its standard error by the bootstrap."""
    ratios = with_cache / without
    draws = np.random.default_rng(1).choice(ratios, (1000, len(ratios)))
    return {"median": float(np.median(ratios)), "error": float(np.median(draws, axis=1).std())}


class _NoMemory:
    """See `StateMemory`: for prompts of which nothing is ever found."""

    def fork_page(self, from_page: int, to_page: int) -> None:
        raise AssertionError("a page was found")

    fork_record = fork_page

    def read_page(self, page: int) -> bytes:
        return b""

    def write_page(self, page: int, data: bytes) -> None: ...

    read_record, write_record = read_page, write_page


def scheduling_s(length: int, rng: np.random.Generator) -> dict[str, float]:
    """Scheduling seconds of a prompt of `length` tokens in chunks of 512 and its answer, with and without the cache."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    pools = {
        "with": CachingPool(2048, 16, memory=_NoMemory(), cost=lambda begin, end: float(end - begin)),
        "without": PagePool(2048, 16),
    }
    for number in range(41):
        prompt = rng.integers(1 << 17, size=length).tolist()
        for name, pool in pools.items():
            request = GenerationRequest(tuple(prompt), SamplingParams(), lambda chunk: None, str(number))
            sequence = Sequence(number, request, list(prompt), _ANSWER_TOKENS)
            begun = time.perf_counter()
            _schedule(Scheduler(pool, 32, 512), sequence)
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(all_of) for name, all_of in times.items()}


def _schedule(scheduler: Scheduler, sequence: Sequence) -> None:
    """Schedule a sequence to its end."""
    scheduler.add(sequence)
    while scheduler.has_work:
        for item in scheduler.schedule():
            sequence.num_computed += item.num_tokens
            if item.samples:
                sequence.token_ids.append(7)
            if sequence.num_generated == _ANSWER_TOKENS:
                scheduler.finish(sequence)


def _prompt(engine: Engine, length: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(engine.vocab_size, size=length).tolist()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(bundled_model_path()))
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overhead-lengths", type=int, nargs="*", default=[32, 512])
    parser.add_argument("--overhead-seconds", type=float, default=40.0)
    args = parser.parse_args()
    engine = Engine.load(EngineConfig(model=args.model, accelerator="none"))
    rng = np.random.default_rng(7)
    ask(engine, _prompt(engine, 64, rng), 8)
    result = {"model": engine.info.architecture, "cpu_isa": engine.info.cpu_isa}
    if args.rounds:
        result |= second_turns(engine, args.prompt_tokens, args.rounds, rng)
    if args.overhead_lengths:
        result["overhead"] = never_found(engine, args.overhead_lengths, args.overhead_seconds, rng)
        result["scheduling_s"] = {length: scheduling_s(length, rng) for length in args.overhead_lengths}
    print(json.dumps(result, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
