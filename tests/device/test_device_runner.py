"""The whole runner on the fake device: table steps by graph and eagerly, steps placed by the host, falling back.

Every layer is held to the sum of its experts, but for the order of additions and what that rounds otherwise
(`LayerSums`). Logits are held to a reference's as closely as bf16 lets them be: a sum that is added up in another order
now and then falls to the other side of a rounding, and from there on roundings fall independently. Both runs round the
same values to bf16, so each row lies about as far from that of float32 as the other run's, and they within twice that
of one another.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import KernelError
from twofold.api.types import SamplingParams, TokenLogprob
from twofold.device.runner import DeviceRunner
from twofold.engine import Engine
from twofold.experts.profiles import Figure, load_profile
from twofold.models.bundled import bundled_model_path
from twofold.step.sampler import Sampler

from tests.device.fake_device import FakeQueue
from tests.device.layer_sums import LayerSums
from tests.device.runner_references import TINY, TOKENS, References, references_of
from tests.device.runner_runs import F32, Lost, Play, make_runner, scripted
from tests.engine.scripted_sampler import ScriptedSampler
from tests.tiny_models.writing import (
    tiny_weights,
    write_tiny_model,
    write_weights,
)

EXPERTS = 3 * 10


@pytest.fixture(scope="module")
def fast_link(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A machine whose link is worth more than its CPU."""
    machine = load_profile("h200-pcie5")
    samplers = {
        "cpu_bandwidth_gbps": 0.1,
        "cpu_expert_overhead_us": 20.0,
        "link_latency_us": 0.1,
        "handshake_us": 20.0,
    }
    figures = {name: Figure(value, "a test") for name, value in samplers.items()}
    path = tmp_path_factory.mktemp("machine") / "fast.json"
    path.write_text(replace(machine, figures={**machine.figures, **figures}).to_json(), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def reference(fake: ModuleType, path: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    return references_of(tiny_weights(TINY), fake, path, tmp_path_factory.mktemp("in_f32"))


@pytest.fixture(scope="module")
def calm(fake: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, References]:
    """A model whose layers add little to the residual: what a router says a layer ahead, it says in its own."""
    weights = tiny_weights(TINY)
    for name, values in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values /= 64
    path = write_tiny_model(tmp_path_factory.mktemp("calm"), TINY)
    write_weights(path, weights, dtype=TINY.dtype, num_shards=TINY.num_shards)
    return path, references_of(weights, fake, path, tmp_path_factory.mktemp("calm_in_f32"))


def test_roundings_to_bf16_are_a_small_share_of_the_logits(reference: References) -> None:
    """The tolerance of `References.close` is meaningful: independent roundings, eight per layer and two of the head."""
    for size in (1, 3):
        _, distance = reference.of(size, TOKENS)
        assert 0 < distance < 2.0**-8 * (8 * TINY.num_layers + 2) ** 0.5


@pytest.mark.parametrize(
    ("size", "share", "policy", "graphs"),
    [
        *((size, share, "payback", True) for size in (1, 3) for share in (0.0, 0.1, 0.25, 0.5, 1.0)),
        *((3, share, "lru", True) for share in (0.1, 0.5)),
        *((3, share, "payback", False) for share in (0.0, 0.25, 1.0)),
    ],
)
def test_logits_do_not_depend_on_where_experts_run(
    fake: ModuleType,
    path: Path,
    reference: References,
    size: int,
    share: float,
    policy: str,
    graphs: bool,
) -> None:
    runner = make_runner(fake, path, slots=round(share * EXPERTS), policy=policy, graphs=graphs)
    sums = LayerSums(fake, runner, path)
    assert reference.close(scripted(runner, size, TOKENS, TINY.vocab_size), size)
    assert sums.worst <= 1
    assert sums.num_rows == 3 * sum(5 + 3 * n + TOKENS - 1 for n in range(size))
    assert runner.num_table_steps >= TOKENS - 2
    assert runner.why_placed is None
    assert (runner.why_eager is None) == graphs
    counts = runner.moe.counts()
    assert (counts.hits > 0) == (share > 0)
    assert share < 1.0 or counts.cpu_misses == 0


@pytest.mark.parametrize("size", [2, 5, 9, pytest.param(20, marks=pytest.mark.slow)])
def test_batches_are_padded_to_a_graph_without_changing_a_row(
    fake: ModuleType, path: Path, reference: References, size: int
) -> None:
    runner = make_runner(fake, path, slots=EXPERTS // 3)
    sums = LayerSums(fake, runner, path)
    assert reference.close(scripted(runner, size, 4, TINY.vocab_size), size, 4)
    assert sums.worst <= 1
    assert runner.num_table_steps > 0


def test_more_sequences_than_a_graph_holds_are_placed_by_the_host(fake: ModuleType, path: Path) -> None:
    placed = make_runner(fake, path, slots=0, table_steps=False)
    runner = make_runner(fake, path, slots=EXPERTS // 3)
    prompts = [[n, n + 1] for n in range(33)]

    def answer(by: DeviceRunner) -> list[list[int]]:
        samplers = [Sampler(SamplingParams(temperature=0.0), prompt) for prompt in prompts]
        return Play(by, max_batched_tokens=80).answer(prompts, samplers, 2)

    assert answer(runner) == answer(placed)
    assert runner.num_table_steps == 0
    assert runner.why_placed is None


@pytest.mark.parametrize(
    "device",
    [{"most_delay_us": 300.0}, {"fail_issue": 0.3}, {"fail_completion": 0.3}, {"refuse_pinning": True}],
)
def test_experts_are_swapped_between_steps_at_any_link_speed(
    fake: ModuleType, path: Path, reference: References, device: dict[str, float]
) -> None:
    # A copy that a layer waits for may be refused, but not fail on its way.
    rules = {"fetch_rule": "none"} if "fail_completion" in device else {}
    runner = make_runner(fake, path, slots=6, policy="lru", prefetch="on", device=device, rules=rules)
    sums = LayerSums(fake, runner, path)
    assert reference.close(scripted(runner, 3, TOKENS, TINY.vocab_size), 3)
    assert sums.worst <= 1
    counts = runner.moe.counts()
    assert counts.uploads > 10
    assert counts.evictions > 4
    assert runner.why_placed is None


def test_the_device_reads_misses_of_several_tokens_and_reports_it(
    fake: ModuleType, path: Path, reference: References, fast_link: str
) -> None:
    """A link that is worth reading over; of one token it says nothing new."""
    runner = make_runner(fake, path, slots=6, machine=fast_link)
    sums = LayerSums(fake, runner, path)
    runner.moe.executor.events_enabled = True
    assert reference.close(scripted(runner, 3, TOKENS, TINY.vocab_size), 3)
    assert sums.worst <= 1
    rows = runner.moe.drain_events()["token_layer"]
    of_step, sizes = np.unique(rows["step"], return_counts=True)
    batches = np.isin(rows["step"], of_step[sizes == 3 * 3])  # one token of each request, three layers
    assert batches.sum() > 9
    assert rows["num_fetched"][batches].sum() > 0
    assert runner.why_placed is None


@pytest.mark.parametrize(("size", "table_steps"), [(1, True), (3, True), (3, False)])
def test_layers_that_are_pinned_stay_where_they_are(
    fake: ModuleType, path: Path, reference: References, fast_link: str, size: int, table_steps: bool
) -> None:
    """The first layer's experts are all resident; the last's run on the CPU, over whatever link, never read by the
    device."""
    per_layer = EXPERTS // 3
    runner = make_runner(
        fake,
        path,
        slots=per_layer + 4,
        machine=fast_link,
        expert_devices=("gpu", "auto", "cpu"),
        table_steps=table_steps,
    )
    sums = LayerSums(fake, runner, path)
    runner.moe.executor.events_enabled = True
    assert reference.close(scripted(runner, size, TOKENS, TINY.vocab_size), size)
    assert sums.worst <= 1
    events = runner.moe.drain_events()
    rows = events["token_layer"]
    pinned, never = rows[rows["layer"] == 0], rows[rows["layer"] == 2]
    assert pinned["num_hits"].sum() == pinned["num_routed"].sum() > 0
    assert never["num_cpu"].sum() == never["num_routed"].sum() > 0
    assert set(events["upload"]["layer"].tolist()) <= {1}
    states = runner.moe.executor.placement()
    assert states is not None
    assert (states[0][0] == 2).all()
    assert (states[0][2] == 0).all()


@pytest.mark.parametrize("size", [1, 3])
def test_what_the_next_router_names_is_uploaded_in_the_same_step_and_changes_no_answer(
    fake: ModuleType, calm: tuple[Path, References], fast_link: str, size: int
) -> None:
    path, reference = calm
    # Half of the experts have a slot, and copies are short beside what the CPU takes for a miss.
    runner = make_runner(
        fake,
        path,
        slots=15,
        policy="payback",
        prefetch="on",
        device={"tick_us": 25.0},
        machine=fast_link,
        rules={"fetch_rule": "none"},
    )
    sums = LayerSums(fake, runner, path)
    runner.moe.executor.events_enabled = True
    long = 3 * TOKENS
    logits, events = [], []
    for _ in range(2):
        logits.append(scripted(runner, size, long, TINY.vocab_size))
        events.append(runner.moe.drain_events())
    assert reference.close(logits[0], size, long)
    assert reference.close(logits[1], size, long)
    assert sums.worst <= 1
    counts = runner.moe.scheduler_counts()["prefetch"]
    assert counts["correct"] > 0.9 * counts["predicted"]
    assert counts["used"] > 0
    assert counts["foreseen"] > 0
    uploads = np.concatenate([of_run["upload"] for of_run in events])
    assert (uploads["reason"] == 2).any()
    assert (uploads["layer"][uploads["reason"] == 2] > 0).all()
    assert runner.why_placed is None


def test_with_the_placement_frozen_two_runs_are_bit_identical(
    fake: ModuleType, path: Path, tmp_path: Path
) -> None:
    warm = make_runner(fake, path, slots=12)
    scripted(warm, 3, TOKENS, TINY.vocab_size)
    warm.moe.save_cache(tmp_path / "cache")

    def run() -> F32:
        runner = make_runner(fake, path, slots=12, rules={"fetch_rule": "none", "background_uploads": False})
        assert runner.moe.restore_cache(tmp_path / "cache") > 6
        logits = scripted(runner, 3, TOKENS, TINY.vocab_size)
        assert runner.moe.counts().hits > 0
        assert runner.moe.counts().uploads == 0
        return logits

    np.testing.assert_array_equal(run(), run())


@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("silent", "the GPU posted nothing at MoE layer"),
        ("raising", "launching a step failed (no such kernel)"),
        ("aborted", "the step was aborted at MoE layer"),
    ],
)
def test_a_lost_step_is_placed_by_the_host_and_the_request_continues(
    fake: ModuleType,
    path: Path,
    reference: References,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
    way: str,
    says: str,
) -> None:
    runner = make_runner(fake, path, slots=9, graphs=graphs, watchdog_s=60.0)
    lost = Lost(runner, at=4)
    lost.lose(monkeypatch, way)
    on_step = lost.limit_host if way == "silent" else None
    with caplog.at_level(logging.WARNING):
        assert reference.close(scripted(runner, 3, TOKENS, TINY.vocab_size, on_step), 3)
    assert runner.num_table_steps == 4
    assert says in str(runner.why_placed)
    assert sum("placed by the host from now on" in message for message in caplog.messages) == 1
    assert runner.moe.counts().hits > 0  # the host places on slots too


def test_a_step_that_cannot_be_prepared_is_placed_by_the_host(
    fake: ModuleType, path: Path, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(fake, path, slots=9)
    Lost(runner, at=0).lose(monkeypatch, "raising")
    assert reference.close(scripted(runner, 1, TOKENS, TINY.vocab_size), 1)
    assert runner.why_placed == "preparing a step of 1 failed (no such kernel)"


def test_a_device_timeout_ends_the_step(fake: ModuleType, path: Path, reference: References) -> None:
    runner = make_runner(fake, path, slots=0, watchdog_s=1e-7)
    assert reference.close(scripted(runner, 3, TOKENS, TINY.vocab_size), 3)
    assert "watchdog's limit" in str(runner.why_placed)


def test_a_step_that_cannot_be_captured_is_launched_by_the_worker(
    fake: ModuleType, path: Path, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeQueue, run: object, outputs: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeQueue, "capture", refuse)
    runner = make_runner(fake, path, slots=9)
    assert reference.close(scripted(runner, 3, TOKENS, TINY.vocab_size), 3)
    assert "capturing a step of" in str(runner.why_eager)
    assert runner.why_placed is None


def test_a_device_that_accepts_no_upload_fails_steps_with_the_reason(fake: ModuleType, path: Path) -> None:
    runner = make_runner(fake, path, slots=6, policy="lru", device={"fail_issue": 1.0})
    for _ in range(2):
        with pytest.raises(KernelError, match="uploads in a row"):
            scripted(runner, 1, TOKENS, TINY.vocab_size)


@pytest.mark.parametrize("handshake", ["kernels", "stream-memory", "host-function"])
def test_every_way_of_handshake_carries_whole_steps(
    fake: ModuleType, path: Path, reference: References, handshake: str
) -> None:
    runner = make_runner(fake, path, slots=9, handshake=handshake)
    assert reference.close(scripted(runner, 1, TOKENS, TINY.vocab_size), 1)
    assert runner.why_placed is None


def test_every_token_of_every_layer_is_in_the_events_with_the_devices_times(
    fake: ModuleType, path: Path
) -> None:
    runner = make_runner(fake, path, slots=9)
    runner.moe.executor.events_enabled = True
    scripted(runner, 3, TOKENS, TINY.vocab_size)
    rows = runner.moe.drain_events()["token_layer"]
    prompt_tokens = sum(5 + 3 * n for n in range(3))
    assert len(rows) == 3 * (prompt_tokens + 3 * (TOKENS - 1))
    placed = rows["num_hits"].astype(int) + rows["num_cpu"] + rows["num_fetched"]
    assert (placed == TINY.top_k).all()
    decoding = rows[rows["step"] > 0]
    assert (decoding["layer_us"] > 0).all()
    seen = {tuple(row) for row in rows[["request", "position", "layer"]].tolist()}
    assert len(seen) == len(rows)


def test_the_bundled_model_answers_as_on_the_cpu(fake: ModuleType) -> None:
    path = bundled_model_path()
    engine = Engine.load(
        EngineConfig(model=str(path), accelerator="none", cpu_threads=2, max_total_tokens=512)
    )
    prompt = engine.tokenizer.encode("Once upon a time")
    plain: list[int] = []
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    engine.generate(prompt, sampling, lambda chunk: plain.extend(chunk.token_ids))
    engine.close()
    for slots in (0, 48, 6 * 32):
        runner = make_runner(fake, path, slots=slots)
        assert Play(runner).answer([prompt], [Sampler(sampling, prompt)], TOKENS) == [plain]
        assert runner.num_table_steps == TOKENS - 1


def test_rows_that_report_log_probabilities_are_sampled_from_the_devices_logits(
    fake: ModuleType, path: Path
) -> None:
    params = SamplingParams(temperature=1.0, seed=4, ignore_eos=True)
    prompts = [[1, 2, 3, 4], [9, 8, 7]]
    plain = Play(make_runner(fake, path, slots=6)).answer(
        prompts, [Sampler(params, prompt) for prompt in prompts], 6
    )
    reported: list[TokenLogprob] = []

    class Reporting(Sampler):
        def draw(self, num_later: int = 0) -> None:
            if self.logprob is not None:
                reported.append(self.logprob)
            super().draw(num_later)

    runner = make_runner(fake, path, slots=6)
    samplers = [Reporting(replace(params, logprobs=2), prompts[0]), Sampler(params, prompts[1])]
    assert Play(runner).answer(prompts, samplers, 6) == plain
    samplers = [ScriptedSampler(tokens) for tokens in plain]
    Play(make_runner(fake, path, slots=6)).answer(prompts, samplers, 6)
    for found, token, row in zip(reported, plain[0][:5], samplers[0].seen, strict=False):
        logits = row.astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert found.token_id == token
        assert abs(found.logprob - expected[token]) < 1e-12
    assert len(reported) == 5
    assert runner.num_table_steps == 5
