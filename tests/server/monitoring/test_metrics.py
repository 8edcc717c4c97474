"""/metrics checked by hand: values of vLLM's names and buckets for a few known requests."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from twofold.api.request_times import PARTS, RequestTimes
from twofold.api.types import Chunk, SpeculationCounts, Usage
from twofold.server.bridge.observe.metrics import (
    _STAGES,
    Metrics,
    Series,
    _bound_text,
    _buckets_up_to,
    exposition,
)

from tests.server.fake_engine import FakeEngine

HTTP = httpx.Client(timeout=30)
MODEL = 'model_name="fake-tales"'


def series(url: str) -> dict[str, float]:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def buckets(found: dict[str, float], name: str) -> list[tuple[str, float]]:
    """(bound, observations that are in this bucket alone)."""
    start = f'vllm:{name}_bucket{{{MODEL},le="'
    rows = [(key[len(start) : -2], value) for key, value in found.items() if key.startswith(start)]
    before = [0.0, *(value for _, value in rows)]
    return [(bound, value - less) for (bound, value), less in zip(rows, before, strict=False)]


def filled(found: dict[str, float], name: str) -> dict[str, float]:
    return {bound: count for bound, count in buckets(found, name) if count}


def complete(url: str, prompt: str, **fields: object) -> None:
    body = {"prompt": prompt, "temperature": 1.0, **fields}
    HTTP.post(f"{url}/v1/completions", json=body).raise_for_status()


@pytest.fixture
def found(url: str) -> dict[str, float]:
    """After prompts of 3 and of 12 words; the second with 2 answers and max_tokens 4."""
    complete(url, "a b c")
    complete(url, " ".join("abcdefghijkl"), n=2, max_tokens=4)
    return series(url)


@pytest.mark.parametrize(
    ("name", "expected", "total"),
    [
        # each answer of the fake engine: 0.25 s in the queue, 0.5 s prefill, 1.5 s decode
        ("request_queue_time_seconds", {"0.3": 3}, 0.75),
        ("request_prefill_time_seconds", {"0.5": 3}, 1.5),
        ("request_decode_time_seconds", {"1.5": 3}, 4.5),
        ("request_inference_time_seconds", {"2.0": 3}, 6.0),
        # 1.5 s for 2 tokens after the first, twice 1.5 s for 3
        ("request_time_per_output_token_seconds", {"0.75": 1, "0.5": 2}, 1.75),
        ("request_prompt_tokens", {"5.0": 1, "20.0": 2}, 27),
        # all but one of a prompt's tokens are cached
        ("request_prefill_kv_computed_tokens", {"1.0": 3}, 3),
        ("request_generation_tokens", {"5.0": 3}, 11),
        ("request_max_num_generation_tokens", {"5.0": 2}, 7),
        ("request_params_n", {"1.0": 1, "2.0": 1}, 3),
        ("iteration_tokens_total", {"1.0": 3, "16.0": 2, "+Inf": 1}, 40021),
    ],
)
def test_a_histogram(found: dict[str, float], name: str, expected: dict[str, float], total: float) -> None:
    assert filled(found, name) == expected
    assert found[f"vllm:{name}_sum{{{MODEL}}}"] == pytest.approx(total)
    assert found[f"vllm:{name}_count{{{MODEL}}}"] == sum(expected.values())


def test_counters_and_gauges(found: dict[str, float]) -> None:
    assert found[f"vllm:prompt_tokens_total{{{MODEL}}}"] == 15
    assert found[f"vllm:prompt_tokens_cached_total{{{MODEL}}}"] == 13
    assert found[f"vllm:generation_tokens_total{{{MODEL}}}"] == 11
    assert found[f"vllm:num_preemptions_total{{{MODEL}}}"] == 5
    assert found[f"vllm:kv_cache_usage_perc{{{MODEL}}}"] == 0.25
    assert found[f'vllm:request_success_total{{{MODEL},finished_reason="length"}}'] == 2
    # An outcome that has not happened yet is 0, not missing.
    assert found[f'vllm:request_success_total{{{MODEL},finished_reason="error"}}'] == 0
    assert found[f'twofold:requests_refused_total{{{MODEL},code="503"}}'] == 0
    (config,) = (name for name in found if name.startswith("vllm:cache_config_info"))
    assert 'block_size="' in config
    assert 'num_gpu_blocks="4"' in config
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_max_tokens"):
        assert found[f"vllm:{name}_count{{{MODEL}}}"] == 3
    assert found[f"vllm:inter_token_latency_seconds_count{{{MODEL}}}"] == 8


def test_names_of_vllm_beside_ours(found: dict[str, float]) -> None:
    def of(name: str, **labels: str) -> float:
        return found[
            f"{name}{{{MODEL}{''.join(f',{key}=' + chr(34) + value + chr(34) for key, value in labels.items())}}}"
        ]

    assert of("vllm:prompt_tokens_by_source_total", source="local_compute") == 2
    assert of("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 13
    assert of("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert of("vllm:engine_sleep_state", sleep_state="discard_all") == 0
    older, newer = (
        buckets(found, f"{name}_seconds") for name in ("time_per_output_token", "inter_token_latency")
    )
    assert older == newer
    assert of("http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 2
    assert of("twofold:expert_uses_total", place="vram") == 30
    assert of("twofold:prefetch_experts_total", outcome="late") == 4
    (info,) = (name for name in found if name.startswith("twofold:info"))
    assert 'accelerator="emulated:rtx4090-pcie4",clock="virtual",policy="lru"' in info


def test_unknown_paths_and_methods_make_no_series(url: str) -> None:
    for number in range(3):
        HTTP.request("BREW", f"{url}/pot-{number}")
    counted = {name: value for name, value in series(url).items() if name.startswith("http_requests_total")}
    assert counted == {f'http_requests_total{{{MODEL},handler="none",method="other",status="4xx"}}': 3}


def test_figures_of_the_process(found: dict[str, float]) -> None:
    """The test serves in its own process."""
    assert found[f"process_resident_memory_bytes{{{MODEL}}}"] == pytest.approx(resident_bytes(), rel=0.5)
    assert found[f"process_start_time_seconds{{{MODEL}}}"] < time.time()
    assert found[f"process_cpu_seconds_total{{{MODEL}}}"] == pytest.approx(
        time.process_time(), rel=0.5, abs=2
    )
    assert 3 < found[f"process_open_fds{{{MODEL}}}"] < found[f"process_max_fds{{{MODEL}}}"]


def test_the_process_start_does_not_move(found: dict[str, float], url: str) -> None:
    """A start that differs between two scrapes counts as a restart."""
    name = f"process_start_time_seconds{{{MODEL}}}"
    assert {series(url)[name] for _ in range(20)} == {found[name]}


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.parametrize("speculates", [False, True])
def test_speculation(url: str, engine: FakeEngine, speculates: bool) -> None:
    """vLLM's names appear with the first draft."""
    engine.speculation = SpeculationCounts(5, 15, 9, (4, 3, 2)) if speculates else None
    found = {
        name.replace(f"{{{MODEL}", "{"): value for name, value in series(url).items() if "spec_decode" in name
    }
    assert found == (
        {
            "vllm:spec_decode_num_drafts_total{}": 5,
            "vllm:spec_decode_num_draft_tokens_total{}": 15,
            "vllm:spec_decode_num_accepted_tokens_total{}": 9,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="0"}': 4,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="1"}': 3,
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{,position="2"}': 2,
        }
        if speculates
        else {}
    )


def test_stages_of_the_answers(found: dict[str, float]) -> None:
    def stage(name: str, figure: str = "sum") -> float:
        return found[f'twofold:request_stage_seconds_{figure}{{{MODEL},stage="{name}"}}']

    assert (stage("queue"), stage("prefill"), stage("decode")) == pytest.approx((0.75, 1.5, 4.5))
    assert stage("read") > 0 < stage("tokenise")
    assert stage("template") == stage("compile") == stage("parse_wait") == 0
    assert {stage(name, "count") for name in _STAGES} == {3}


def test_stages_before_the_first_token_sum_to_its_time() -> None:
    """The time to deliver the first token is what the engine's own times leave of TTFT."""
    metrics = Metrics()
    now = time.perf_counter()
    times = RequestTimes(
        now - 30, time.time() - 30, now - 25, {**dict.fromkeys(PARTS, 0.0), "read": 4.0, "tokenise": 1.0}
    )
    (timer,) = metrics.begin(1, times)
    usage = Usage(3, 2, wall_s=(10.0, 14.0, 2.0))
    timer.observe([Chunk("a", (1,)), Chunk("b", (2,), "stop", usage)])
    stages = timer.stages(usage)
    assert stages["deliver"] == pytest.approx(1.0, abs=0.5)
    lines = exposition([Series("m", metrics.counters(), metrics.histograms())]).splitlines()
    prefix = "vllm:time_to_first_token_seconds_sum"
    (ttft_s,) = (float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))
    assert sum(stages.values()) - stages["decode"] == pytest.approx(ttft_s, abs=1e-9)
    assert times.first_sent_s == pytest.approx(time.time(), abs=60)


def test_bounds_are_vllms(found: dict[str, float], engine: FakeEngine) -> None:
    assert engine.max_context == 64
    assert [bound for bound, _ in buckets(found, "request_prompt_tokens")] == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "+Inf",
    ]
    of_requests = [bound for bound, _ in buckets(found, "e2e_request_latency_seconds")]
    assert (of_requests[0], of_requests[-2], len(of_requests)) == ("0.3", "7680.0", 22)
    of_tokens = [bound for bound, _ in buckets(found, "inter_token_latency_seconds")]
    assert (of_tokens[0], of_tokens[-2], len(of_tokens)) == ("0.01", "80.0", 20)
    of_first = [bound for bound, _ in buckets(found, "time_to_first_token_seconds")]
    assert (of_first[0], of_first[-2], len(of_first)) == ("0.001", "2560.0", 23)


def test_an_answer_that_is_given_up_has_no_times(url: str, engine: FakeEngine) -> None:
    engine.fail_after_words = 1
    assert HTTP.post(f"{url}/v1/completions", json={"prompt": "a b c"}).status_code == 500
    found = series(url)
    assert found[f'vllm:request_success_total{{{MODEL},finished_reason="error"}}'] == 1
    assert found[f"vllm:request_queue_time_seconds_count{{{MODEL}}}"] == 0
    assert found[f"vllm:e2e_request_latency_seconds_count{{{MODEL}}}"] == 0


def test_bounds_of_a_million_tokens_are_written_as_prometheus_client_does() -> None:
    bounds = [_bound_text(bound) for bound in _buckets_up_to(20_000_000)]
    assert bounds[14:] == [
        "50000.0",
        "100000.0",
        "200000.0",
        "500000.0",
        "1e+06",
        "2e+06",
        "5e+06",
        "1e+07",
        "2e+07",
    ]
