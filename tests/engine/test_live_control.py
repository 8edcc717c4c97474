"""Memory split otherwise while requests run: no token changes, nothing is half-done. Bundled model, emulated device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import CapacityError, ConfigError, TwofoldError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.waiting import Waiter

from tests.e2e.waiting import wait_until
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import write_tiny_model

STREAMS = 16
TOKENS = 40
PROMPTS = [
    f"Once upon a time there were {n} foxes and a king of the {n * 7} hills" * 2 for n in range(STREAMS)
]
WAIT_S = 60


def load(accelerator: str = "emulated:rtx4090-pcie4", **settings: object) -> Engine:
    sizes: dict[str, object] = {"max_total_tokens": 4096, "max_num_seqs": STREAMS, "cpu_threads": 2}
    return Engine.load(EngineConfig(accelerator=accelerator, **(sizes | settings)))  # type: ignore[arg-type]


class Streams:
    """One request per prompt, half of them greedy; keeps their tokens."""

    def __init__(self, engine: Engine, prompts: list[str] = PROMPTS, tokens: int = TOKENS) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ends: list[str | None] = [None] * len(prompts)
        self._moved = threading.Condition()
        for n, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.9 * (n % 2), seed=n)
            ids = tuple(engine.tokenizer.encode(prompt))
            engine.submit(GenerationRequest(ids, sampling, self._taking(n), f"r{n}"))

    def _taking(self, n: int) -> Callable[[Chunk], None]:
        def take(chunk: Chunk) -> None:
            with self._moved:
                self.tokens[n] += chunk.token_ids
                self.ends[n] = chunk.finish_reason or self.ends[n]
                self._moved.notify_all()

        return take

    def wait_for(self, num_tokens: int) -> None:
        """Waits for `num_tokens` tokens of all requests together."""
        with self._moved:
            assert self._moved.wait_for(lambda: sum(map(len, self.tokens)) >= num_tokens, WAIT_S)

    def finish(self) -> list[list[int]]:
        with self._moved:
            assert self._moved.wait_for(lambda: all(self.ends), WAIT_S)
        assert set(self.ends) == {"length"}
        return self.tokens


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    engine = load()
    engine.start()
    tokens = Streams(engine).finish()
    engine.close()
    return tokens


@pytest.fixture
def engine() -> Iterator[Engine]:
    loaded = load()
    loaded.start()
    yield loaded
    loaded.close()


def test_no_token_of_16_streams_changes_whatever_is_resized(
    engine: Engine, undisturbed: list[list[int]]
) -> None:
    streams = Streams(engine)
    hits, resizes = (
        [],
        (
            Resize(gpu_experts_ratio=0.6),
            Resize(max_total_tokens=1024),  # less than they need: some give their pages back
            Resize(gpu_experts_ratio=0.0, max_total_tokens=8192),
            Resize(num_gpu_experts=3, max_total_tokens=2048),
            Resize(gpu_experts_ratio=1.0),
        ),
    )
    for turn, resize in enumerate(resizes):
        streams.wait_for(STREAMS * (4 + 6 * turn))
        split = engine.control.resize(resize)
        memory = engine.control.memory()
        assert (memory.num_slots, memory.num_pages) == (split.num_slots, split.num_pages)
        hits.append(engine.stats().placement.hits)
    assert streams.finish() == undisturbed
    assert hits == sorted(hits)
    assert (
        engine.info.num_slots
        == engine.control.split.num_slots
        == engine.info.num_layers * engine.info.num_experts
    )
    assert engine.stats().num_free_pages == 2048 // 16


def test_sleep_frees_memory_and_waking_continues(engine: Engine, undisturbed: list[list[int]]) -> None:
    streams = Streams(engine)
    streams.wait_for(STREAMS * 10)
    before = engine.control.memory()
    engine.control.sleep()
    engine.control.sleep()
    asleep = engine.control.memory()
    assert (asleep.slots_bytes, asleep.num_slots, asleep.num_pages, asleep.num_cached_pages) == (0, 0, 1, 0)
    assert {progress.is_running for progress in engine.control.requests()} == {False}
    with pytest.raises(CapacityError, match="is asleep") as refused:
        Streams(engine, ["hello"])
    assert refused.value.asleep
    with pytest.raises(ConfigError, match="wake it first"):
        engine.control.resize(Resize(gpu_experts_ratio=0.5))
    counted = sum(map(len, streams.tokens))
    engine.control.wake()
    engine.control.wake()
    assert streams.finish() == undisturbed
    assert counted < STREAMS * TOKENS
    after = engine.control.memory()
    assert (after.slots_bytes, after.num_slots, after.num_pages) == (
        before.slots_bytes,
        before.num_slots,
        before.num_pages,
    )


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (Resize(), "no new size was given"),
        (Resize(gpu_experts_ratio=1.5), "--gpu-experts-ratio was given 1.5"),
        (Resize(num_gpu_experts=10_000), "--num-gpu-experts was given 10000; the model has"),
        (Resize(max_total_tokens=5), "less than one page of 16"),
        (Resize(max_total_tokens=10**12), r"there is memory for \d+ tokens"),
        (Resize(max_total_tokens=64), r"request r\d+ may need \d+: give --max-total-tokens of at least \d+"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_has_changed(
    engine: Engine, undisturbed: list[list[int]], requested: Resize, words: str
) -> None:
    streams = Streams(engine)
    streams.wait_for(STREAMS)
    before = engine.control.split
    with pytest.raises(ConfigError, match=words):
        engine.control.resize(requested)
    assert engine.control.split == before
    assert streams.finish() == undisturbed


def test_a_part_that_fails_is_undone(
    engine: Engine, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(engine)
    streams.wait_for(STREAMS * 8)
    before = engine.control.split
    make = engine.runner.moe._make

    def fail_once(slots: object) -> object:
        monkeypatch.setattr(engine.runner.moe, "_make", make)
        raise CapacityError("the device is full")

    monkeypatch.setattr(engine.runner.moe, "_make", fail_once)
    with pytest.raises(CapacityError, match="full"):
        engine.control.resize(Resize(gpu_experts_ratio=0.9, max_total_tokens=1024))
    memory = engine.control.memory()
    assert engine.control.split == before
    assert (memory.num_slots, memory.num_pages) == (before.num_slots, before.num_pages)
    assert streams.finish() == undisturbed


def test_a_smaller_cache_keeps_the_worthiest_prefixes_where_they_are_found() -> None:
    engine = load(max_total_tokens=2048)
    engine.start()
    first = Streams(engine, PROMPTS[:1]).finish()
    Streams(engine, PROMPTS[1:6]).finish()
    full = engine.control.memory().num_cached_pages
    engine.control.resize(Resize(max_total_tokens=512))
    assert 0 < engine.control.memory().num_cached_pages <= min(full, 32)
    assert Streams(engine, PROMPTS[:1]).finish() == first
    hits = engine.stats().prefix_cache_hits
    assert Streams(engine, PROMPTS[:1]).finish() == first
    assert engine.stats().prefix_cache_hits > hits
    assert engine.control.drop_prefixes() > 0
    assert engine.control.memory().num_cached_pages == 0
    engine.close()


def test_records_move_with_their_sequences(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "next", tiny("qwen3_next"))

    def answers(disturb: bool) -> list[list[int]]:
        engine = load(model=str(model), max_num_seqs=4)
        engine.start()
        streams = Streams(engine, [prompt[:40] for prompt in PROMPTS[:4]], 200)
        if disturb:
            streams.wait_for(40)
            engine.control.resize(Resize(max_total_tokens=8192, gpu_experts_ratio=0.1))
            engine.control.sleep()
            engine.control.wake()
        found = streams.finish()
        engine.close()
        return found

    assert answers(True) == answers(False)


def test_without_slots_only_the_kv_cache_changes() -> None:
    engine = load("none")
    with pytest.raises(ConfigError, match="accelerator none has no expert slots"):
        engine.control.resize(Resize(gpu_experts_ratio=0.5))
    assert engine.control.resize(Resize(max_total_tokens=1024)).num_pages == 64
    assert engine.control.placement() == []
    engine.control.sleep()
    engine.control.wake()
    assert engine.control.memory().num_pages == 64
    engine.close()


def test_placement_lists_residents_and_stays_bounded(engine: Engine) -> None:
    Streams(engine, PROMPTS[:2]).finish()
    placed = engine.control.placement(None, 10_000)
    info = engine.info
    assert [layer.layer for layer in placed] == list(range(info.num_layers))
    assert 0 < sum(layer.num_resident for layer in placed) <= info.num_slots
    for layer in placed:
        assert sum(state == "resident" for _, state, _ in layer.experts) == layer.num_resident
        assert [worth for _, _, worth in layer.experts] == sorted(
            (w for _, _, w in layer.experts), reverse=True
        )
    assert len(engine.control.placement([0], 3)[0].experts) == 3
    with pytest.raises(ConfigError, match="layer 99"):
        engine.control.placement([99])


def test_commands_to_an_ending_engine_are_refused_immediately() -> None:
    engine = load(max_num_seqs=2)
    engine.start()
    Streams(engine, PROMPTS[:2], 2000)
    with ThreadPoolExecutor(4) as callers:
        orders = [
            callers.submit(engine.control.resize, Resize(max_total_tokens=4096 + 16 * n)) for n in range(40)
        ]
        engine.close()
        outcomes = [order.exception(WAIT_S) for order in orders]
    assert all(error is None or isinstance(error, CapacityError) for error in outcomes)
    # The thread has ended: no caller computes in its place, two at once.
    with pytest.raises(CapacityError, match="closed"):
        engine.control.resize(Resize(max_total_tokens=4096))


def test_a_request_sent_before_the_context_shrank_gets_an_error(engine: Engine) -> None:
    waiter = Waiter(None)
    ids = tuple(engine.tokenizer.encode(PROMPTS[0]))
    entered, held = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        held.wait(WAIT_S)

    with ThreadPoolExecutor(2) as callers:
        blocked = callers.submit(engine._inbox.run_between_steps, hold)
        # Only then: the engine could carry out the other order first.
        assert entered.wait(WAIT_S)
        resized = callers.submit(engine.control.resize, Resize(max_total_tokens=64))
        wait_until(lambda: engine._inbox._tasks)
        engine.submit(GenerationRequest(ids, SamplingParams(max_tokens=500), waiter.receive, "long"))
        held.set()
        blocked.result(WAIT_S)
        assert resized.result(WAIT_S).max_context == 64
    waiter.wait(None, lambda: None)
    with pytest.raises(TwofoldError, match="the context was made smaller, to 64 tokens"):
        waiter.usage()
