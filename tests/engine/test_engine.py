"""The engine as a whole on tiny random models: batching, placement, cancelling and refusing change no one's answer."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import (
    CapacityError,
    ConfigError,
    KernelError,
    ModelLoadError,
    RequestError,
    TwofoldError,
)
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.telemetry.sink import TelemetrySink

from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 17, 40, 9, 26)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(dtype="bfloat16", num_layers=3)))


@pytest.fixture(scope="module")
def plain(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none", cpu_threads=2))
    yield engine
    engine.close()


class Collector:
    """Receives the chunks of one request."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.done = threading.Event()

    def __call__(self, chunk: Chunk) -> None:
        assert not self.done.is_set(), "a chunk came after the last one"
        self.chunks.append(chunk)
        if chunk.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def generate(engine, prompt, **sampling):
    collector = Collector()
    usage = engine.generate(
        prompt, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling}), collector
    )
    return collector.tokens, usage


def submit(engine, prompt, name, **sampling):
    collector = Collector()
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **sampling})
    engine.submit(GenerationRequest(prompt, params, collector, name))
    return collector


def test_generate_counts_and_reports(plain):
    tokens, usage = generate(plain, PROMPTS[0])
    assert len(tokens) == 20
    assert (usage.prompt_tokens, usage.completion_tokens, usage.clock) == (3, 20, "wall")
    assert usage.prefill_s > 0
    assert usage.decode_s > 0


def test_one_wakeup_per_step_for_a_client_with_several_requests(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none", cpu_threads=2))
    chunks: list[Chunk] = []
    seen: list[int] = []

    def wake() -> None:
        seen.append(len(chunks))

    for number in range(16):
        # Some of 16 drawn tokens are whole characters, which are delivered at once.
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=number)
        engine.submit(
            GenerationRequest(PROMPTS[number % 5], sampling, chunks.append, f"r{number}", after_step=wake)
        )
    num_steps = 0
    while engine.step():
        num_steps += 1
        # After all that the step gave, and no more than once.
        assert seen[-1] == len(chunks)
        assert len(seen) == num_steps
    assert sum(len(chunk.token_ids) for chunk in chunks) == 16 * 12
    assert num_steps < 2 * 12
    engine.submit(GenerationRequest(PROMPTS[0], sampling, chunks.append, "given up", after_step=wake))
    engine.cancel("given up")
    assert not engine.step()
    assert chunks[-1].finish_reason == "cancelled"
    assert len(seen) == num_steps + 1
    engine.close()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.6, 1.0])
def test_the_same_tokens_wherever_experts_run(plain, model_dir, ratio):
    config = EngineConfig(model=model_dir, accelerator="emulated:rtx4090-pcie4", gpu_experts_ratio=ratio)
    hybrid = Engine.load(config)
    for prompt in PROMPTS:
        assert (
            generate(hybrid, prompt, temperature=0.8, seed=3)[0]
            == generate(plain, prompt, temperature=0.8, seed=3)[0]
        )
    assert hybrid.info.accelerator == "emulated:rtx4090-pcie4"
    assert hybrid.stats().clock == "virtual"
    counts = hybrid.stats().placement
    assert (counts.hits == 0) == (ratio == 0.0)
    hybrid.close()


def test_requests_that_run_together_get_the_answers_they_get_alone(plain, model_dir):
    alone = [generate(plain, prompt, seed=i, temperature=1.0)[0] for i, prompt in enumerate(PROMPTS)]
    # A small budget and a small cache: prompts come in chunks, and someone is preempted.
    engine = Engine.load(
        EngineConfig(
            model=model_dir, accelerator="none", max_num_batched_tokens=16, max_total_tokens=112, page_size=4
        )
    )
    together = [submit(engine, p, f"r{i}", seed=i, temperature=1.0) for i, p in enumerate(PROMPTS)]
    while engine.step():
        pass
    assert [c.tokens for c in together] == alone
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_preemptions > 0
    assert sum(stats.step_tokens.values()) == stats.num_steps
    assert max(stats.step_tokens) <= 16
    engine.close()


def test_the_wall_clock_is_reported_with_the_emulated_one(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="emulated:rtx4090-pcie4"))
    chunks: list[Chunk] = []
    begun = time.perf_counter()
    engine.generate(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True), chunks.append)
    lasted = time.perf_counter() - begun
    engine.close()
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.clock == "virtual"
    assert usage.max_tokens == 4
    assert min(usage.wall_s) > 0
    assert sum(usage.wall_s) < lasted


def test_the_engine_thread_serves_submissions_from_many_threads(plain, model_dir):
    alone = [generate(plain, prompt)[0] for prompt in PROMPTS]
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    engine.start()
    collectors: dict[int, Collector] = {}
    threads = [
        threading.Thread(target=lambda i=i: collectors.update({i: submit(engine, PROMPTS[i % 5], f"r{i}")}))
        for i in range(15)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(collector.done.wait(30) for collector in collectors.values())
    assert all(collectors[i].tokens == alone[i % 5] for i in range(15))
    engine.close()


def test_cancelling_frees_the_place_and_is_logged(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    gone, kept = submit(engine, PROMPTS[1], "gone", max_tokens=100), submit(engine, PROMPTS[0], "kept")
    for _ in range(4):
        engine.step()
    engine.cancel("gone")
    engine.cancel("never heard of")
    while engine.step():
        pass
    assert gone.chunks[-1].finish_reason == "cancelled"
    assert len(gone.tokens) < 100
    assert kept.chunks[-1].finish_reason == "length"
    assert engine.stats().num_free_pages == engine.stats().num_pages
    engine.close()


def test_a_raising_caller_affects_no_other(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))

    def broken(chunk: Chunk) -> None:
        raise OSError("connection lost")

    engine.submit(GenerationRequest(PROMPTS[0], SamplingParams(max_tokens=50), broken, "broken"))
    kept = submit(engine, PROMPTS[0], "kept")
    while engine.step():
        pass
    assert len(kept.tokens) == 20
    assert engine.stats().num_running == 0
    engine.close()


def test_stop_strings_and_eos_end_an_answer(plain):
    tokens, _ = generate(plain, PROMPTS[1])
    full = plain.tokenizer.decode(tokens)
    stop = full[len(full) // 2 : len(full) // 2 + 2]
    collector = Collector()
    plain.generate(PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)), collector)
    assert collector.chunks[-1].finish_reason == "stop"
    assert collector.text == full[: full.index(stop)]


def test_a_full_context_ends_with_length(plain, model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none", max_model_len=32))
    _, usage = generate(engine, PROMPTS[1], max_tokens=None)
    assert usage.prompt_tokens + usage.completion_tokens == 32
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ((), {}, "prompt"),
        ((1, 2, 99_999), {}, "prompt"),
        ((1, -2), {}, "prompt"),
        (tuple([5] * 100_000), {}, "prompt"),
        ((1,), {"temperature": -0.1}, "temperature"),
        ((1,), {"temperature": float("nan")}, "temperature"),
        ((1,), {"top_p": -0.1}, "top_p"),
        ((1,), {"top_p": 1.1}, "top_p"),
        ((1,), {"max_tokens": -1}, "max_tokens"),
        ((1,), {"seed": -1}, "seed"),
        ((1,), {"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_an_impossible_configuration_is_refused_before_anything_starts(plain, prompt, sampling, param):
    with pytest.raises(RequestError) as caught:
        plain.submit(GenerationRequest(prompt, SamplingParams(**sampling), Collector(), "bad"))
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    assert plain.stats().num_waiting == 0


def test_a_full_queue_and_a_draining_engine_refuse(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none", max_num_seqs=1, max_waiting=1))
    first, second = submit(engine, PROMPTS[0], "a"), submit(engine, PROMPTS[0], "b")
    with pytest.raises(CapacityError) as full:
        submit(engine, PROMPTS[0], "c")
    assert not full.value.draining
    engine.start()
    assert engine.drain(30)
    assert first.done.is_set()
    assert second.done.is_set()
    with pytest.raises(CapacityError) as draining:
        submit(engine, PROMPTS[0], "d")
    assert draining.value.draining
    engine.close()
    engine.close()


def test_closing_cancels_what_still_runs(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    engine.start()
    collector = submit(engine, PROMPTS[0], "long", max_tokens=None)
    engine.close()
    assert collector.done.is_set()
    assert collector.chunks[-1].finish_reason in ("cancelled", "length")


def test_a_request_id_in_use_is_refused(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    submit(engine, PROMPTS[0], "same")
    with pytest.raises(RequestError, match="same"):
        submit(engine, PROMPTS[0], "same")
    engine.close()


def test_a_failing_step_fails_its_requests_and_not_the_engine(model_dir, monkeypatch):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))

    def fail(*args):
        raise RuntimeError("the kernel broke")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fail)
        with pytest.raises(KernelError, match="the kernel broke"):
            generate(engine, PROMPTS[0])
    assert len(generate(engine, PROMPTS[0])[0]) == 20
    assert engine.stats().num_free_pages == engine.stats().num_pages
    engine.close()


@pytest.mark.parametrize(
    "error", [MemoryError(), CapacityError("the device ran out of memory"), RuntimeError()]
)
def test_a_step_that_lacks_memory_logs_what_to_lower(model_dir, monkeypatch, caplog, error):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    engine.memory_advice = ("fit: settings of this run", "  would fit: --max-model-len 64")

    def fail(*args):
        raise error

    monkeypatch.setattr(engine.runner, "forward", fail)
    with pytest.raises(TwofoldError):
        generate(engine, PROMPTS[0])
    assert ("would fit: --max-model-len 64" in caplog.text) == (not isinstance(error, RuntimeError))
    engine.close()


def test_a_bug_in_the_loop_fails_every_waiting_request(model_dir, monkeypatch):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    failures = []
    schedule = engine._scheduler.schedule

    def fail_once():
        if engine._scheduler.has_work and not failures:
            failures.append("once")
            raise ZeroDivisionError("a bug")
        return schedule()

    monkeypatch.setattr(engine._scheduler, "schedule", fail_once)
    engine.start()
    lost = submit(engine, PROMPTS[0], "lost")
    assert lost.done.wait(30)
    assert lost.chunks[-1].finish_reason == "error"
    assert "a bug" in lost.chunks[-1].error
    kept = submit(engine, PROMPTS[0], "kept")
    assert kept.done.wait(30)
    assert len(kept.tokens) == 20
    engine.close()


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"accelerator": "emulated:none"}, ConfigError, "machine profile 'none'"),
        ({"accelerator": "cuda"}, ConfigError, "cuda"),
        ({"accelerator": "emulated:rtx4090-pcie4", "policy": "oldest"}, ConfigError, "payback"),
        ({"max_model_len": 10**9}, ConfigError, "--max-model-len"),
        ({"max_total_tokens": 3}, ConfigError, "--max-total-tokens"),
        ({"model": "/does/not/exist"}, ModelLoadError, "/does/not/exist"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_at_load(model_dir, config, error, words):
    with pytest.raises(error) as caught:
        Engine.load(EngineConfig(**{"model": model_dir, **config}))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class Sink(TelemetrySink):
    """Keeps the events that telemetry receives."""

    def __init__(self):
        self.run, self.requests, self.steps, self.events = None, [], [], {}

    def begin_run(self, run):
        self.run = run

    def request(self, record):
        self.requests.append(record)

    def step(self, record):
        self.steps.append(record)

    def native_events(self, kind, rows):
        self.events.setdefault(kind, []).append(rows.copy())

    def dropped(self, kind, count):
        raise AssertionError(f"{count} {kind} events were dropped")

    def load_samples(self, rows):
        raise AssertionError("the engine makes no load samples")

    def stats(self):
        raise AssertionError("the engine asks for no figures")

    def close(self):
        pass


def test_telemetry_holds_every_decision_of_exactly_this_request(model_dir):
    sink = Sink()
    engine = Engine.load(
        EngineConfig(model=model_dir, accelerator="emulated:rtx4090-pcie4", gpu_experts_ratio=0.5),
        telemetry=sink,
    )
    tokens, usage = generate(engine, PROMPTS[1])
    engine.close()
    layers = sink.run.num_layers
    rows = np.concatenate(sink.events["token_layer"])
    num_computed = usage.prompt_tokens + usage.completion_tokens - 1
    assert len(rows) == layers * num_computed
    assert set(rows["request"]) == {sink.requests[0].number}
    assert sorted(set(rows["position"].tolist())) == list(range(num_computed))
    counts = engine.stats().placement
    assert (rows["num_hits"].sum(), rows["num_cpu"].sum(), rows["num_fetched"].sum()) == (
        counts.hits,
        counts.cpu_misses,
        counts.fetched,
    )
    assert len(np.concatenate(sink.events["upload"])) == counts.uploads > 0
    assert [r.finish_reason for r in sink.requests] == [None, None, "length"]
    assert sink.requests[-1].completion_tokens == len(tokens)
    assert sum(s.num_prefill_tokens for s in sink.steps) == usage.prompt_tokens
    assert sum(s.num_decode_tokens for s in sink.steps) == usage.completion_tokens - 1


def test_routed_experts_are_returned_on_request_and_match_telemetry(model_dir):
    sink = Sink()
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"), telemetry=sink)
    requested, plain = Collector(), Collector()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    engine.submit(GenerationRequest(PROMPTS[1], params, requested, "asked", return_routed_experts=True))
    engine.submit(GenerationRequest(PROMPTS[2], params, plain, "plain"))
    while engine.step():
        pass
    engine.close()
    assert plain.chunks[-1].routed_experts is None
    routed = requested.chunks[-1].routed_experts
    assert routed.shape == (len(PROMPTS[1]) + 9, engine.info.num_layers, engine.info.top_k)
    rows = np.concatenate(sink.events["token_layer"])
    for row in rows[rows["request"] == sink.requests[0].number]:
        assert routed[row["position"], row["layer"]].tolist() == row["experts"][: engine.info.top_k].tolist()


def test_without_a_sink_events_cost_nothing_until_a_request_asks(model_dir):
    engine = Engine.load(EngineConfig(model=model_dir, accelerator="none"))
    collector = Collector()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.submit(GenerationRequest(PROMPTS[0], params, collector, "a", return_routed_experts=True))
    while engine.step():
        pass
    assert len(collector.chunks[-1].routed_experts) == 3 + 4
    generate(engine, PROMPTS[0])
    assert all(len(rows) == 0 for rows in engine.runner.moe.drain_events().values())
    engine.close()
