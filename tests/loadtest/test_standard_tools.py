"""GuideLLM and AIPerf measure a live server, and agree with `twofold bench serve` about what was sent and answered.

Both live in environments of their own: TWOFOLD_GUIDELLM and TWOFOLD_AIPERF name their programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from twofold.models.bundled import bundled_model_path
from twofold.tools.loadgen.server_process import serving

NUM_REQUESTS, CONCURRENCY, INPUT, OUTPUT = 12, 2, 128, 32


class Measured(NamedTuple):
    """What a tool reports; times in milliseconds."""

    completed: int
    failed: int
    output_tokens: float
    """Mean per answer."""
    ttft_p50: float
    itl_mean: float
    request_p50: float


def ours(url: str, folder: Path) -> Measured:
    run(
        [sys.executable, "-m", "twofold.tools.cli", "bench", "serve", "--base-url", url],
        *("--endpoint", "/v1/chat/completions", "--json", str(folder / "ours.json")),
        *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(CONCURRENCY)),
        *("--input-len", str(INPUT), "--output-len", str(OUTPUT)),
    )
    found = json.loads((folder / "ours.json").read_text())["results"][0]
    tokens = found["total_output_tokens"] / max(1, found["completed"])
    times = (found[name] for name in ("median_ttft_ms", "mean_tpot_ms", "median_e2el_ms"))
    return Measured(found["completed"], found["failed"], tokens, *times)


def guidellm(url: str, folder: Path) -> Measured:
    run(
        [program("guidellm") or "", "run", "--disable-console"],
        *("--backend", f"kind=openai_http,target={url},model=twofold-tales"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}", "--seed", "kind=static,value=0"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={bundled_model_path()}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    )
    found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    good = {name: of["successful"] for name, of in found.items() if name != "request_totals"}
    return Measured(
        found["request_totals"]["successful"],
        found["request_totals"]["errored"],
        good["output_token_count"]["mean"],
        good["time_to_first_token_ms"]["percentiles"]["p50"],
        good["inter_token_latency_ms"]["mean"],
        1e3 * good["request_latency"]["percentiles"]["p50"],
    )


def aiperf(url: str, folder: Path) -> Measured:
    # It takes a tokeniser from a Hugging Face cache, not from a folder.
    copy = folder / "hub" / "models--twofold--tales"
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(bundled_model_path(), copy / "snapshots" / "0", ignore=weights)
    (copy / "refs").mkdir()
    (copy / "refs" / "main").write_text("0")
    run(
        [program("aiperf") or "", "profile", "-m", "twofold-tales", "--url", url, "--ui", "none"],
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--tokenizer", "twofold/tales", "--output-artifact-dir", str(folder / "aiperf")),
        *("--concurrency", str(CONCURRENCY), "--request-count", str(NUM_REQUESTS)),
        *("--synthetic-input-tokens-mean", str(INPUT), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(OUTPUT), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--random-seed", "0"),
        environment={"HF_HUB_CACHE": str(folder / "hub")},
    )
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return Measured(
        int(found["request_count"]["avg"]),
        int((found.get("error_request_count") or {"avg": 0})["avg"]),
        found["output_sequence_length"]["avg"],
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["avg"],
        found["request_latency"]["p50"],
    )


TOOLS: dict[str, Callable[[str, Path], Measured]] = {"twofold": ours, "guidellm": guidellm, "aiperf": aiperf}


def program(tool: str) -> str | None:
    """The tool's program; None if it is not installed."""
    return shutil.which(os.environ.get(f"TWOFOLD_{tool.upper()}") or tool)


def run(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run a tool to its end, without the network but loopback."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, **offline, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    serve = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", "0", "--accelerator", "none"]
    with serving(serve, log, timeout_s=120) as server:
        yield server.url


def answered(url: str) -> int:
    """Answers of the server's own count."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return int(
        sum(float(value) for value in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M))
    )


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_standard_tool_gets_its_requested_load(tool: str, url: str, tmp_path: Path) -> None:
    if tool != "twofold" and program(tool) is None:
        pytest.skip(f"{tool} is not installed; TWOFOLD_{tool.upper()} names its program")
    before = answered(url)
    found = TOOLS[tool](url, tmp_path)
    assert (found.completed, found.failed) == (NUM_REQUESTS, 0)
    assert found.output_tokens == OUTPUT
    # `bench serve` warms up with one request.
    assert NUM_REQUESTS <= answered(url) - before <= NUM_REQUESTS + 3
    assert 0 < found.ttft_p50 <= found.request_p50
    assert found.itl_mean < found.request_p50
