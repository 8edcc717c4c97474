"""GuideLLM and AIPerf measure a live server, and agree with `twofold bench serve` about what was sent and answered.

Both live in environments of their own: TWOFOLD_GUIDELLM and TWOFOLD_AIPERF name their programs.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from twofold.tools.loadgen.server_process import serving

from benchmarks.load_tools import TOOLS, Job, program

NUM_REQUESTS = 12


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
def test_a_standard_tool_measures_what_it_asked(tool: str, url: str, tmp_path: Path) -> None:
    if tool != "twofold" and program(tool) is None:
        pytest.skip(f"{tool} is not installed; TWOFOLD_{tool.upper()} names its program")
    before = answered(url)
    found = TOOLS[tool](Job(url, tmp_path, num_requests=NUM_REQUESTS, concurrency=2))
    assert (found.completed, found.failed) == (NUM_REQUESTS, 0)
    assert found.output_tokens == 32
    # `bench serve` warms up with one request.
    assert NUM_REQUESTS <= answered(url) - before <= NUM_REQUESTS + 3
    assert 0 < found.ttft_p50 <= found.request_p50
    assert found.itl_mean < found.request_p50
