"""The same closed loop on one server by three load generators: `twofold bench serve`, GuideLLM and AIPerf.

    python -m benchmarks.load_tools [--rounds 3] [--concurrency 4]

They alternate, so that all meet the same load of the machine. GuideLLM and AIPerf have environments of their own
(`pip install guidellm`, `pip install aiperf`); TWOFOLD_GUIDELLM and TWOFOLD_AIPERF name their programs, otherwise the
PATH is searched. A tool that is not found is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from twofold.models.bundled import bundled_model_path
from twofold.tools.loadgen.server_process import serving

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """A closed loop of chats with fixed lengths."""

    url: str
    folder: Path
    """For the tools' files."""
    num_requests: int = 60
    concurrency: int = 4
    input_len: int = 128
    output_len: int = 32
    seed: int = 0
    """Seed of the prompts; prompts of a repeated seed are in the prefix cache."""


@dataclass(frozen=True)
class Measured:
    """What a tool reports; times in milliseconds."""

    completed: int
    failed: int
    output_tokens: float
    """Mean per answer."""
    ttft_p50: float
    ttft_p95: float
    itl_mean: float
    request_p50: float
    requests_per_s: float


def ours(job: Job) -> Measured:
    file = job.folder / "ours.json"
    _run(
        [sys.executable, "-m", "twofold.tools.cli", "bench", "serve"],
        *("--base-url", job.url, "--endpoint", "/v1/chat/completions", "--json", str(file)),
        *("--num-prompts", str(job.num_requests), "--max-concurrency", str(job.concurrency)),
        *("--input-len", str(job.input_len), "--output-len", str(job.output_len), "--seed", str(job.seed)),
    )
    found = json.loads(file.read_text())["results"][0]
    return Measured(
        completed=found["completed"],
        failed=found["failed"],
        output_tokens=found["total_output_tokens"] / max(1, found["completed"]),
        ttft_p50=found["median_ttft_ms"],
        ttft_p95=found["p95_ttft_ms"],
        itl_mean=found["mean_tpot_ms"],
        request_p50=found["median_e2el_ms"],
        requests_per_s=found["request_throughput"],
    )


def guidellm(job: Job) -> Measured:
    file = job.folder / "guidellm.json"
    lengths = f"prompt_tokens={job.input_len},output_tokens={job.output_len}"
    _run(
        [program("guidellm") or "guidellm", "run", "--disable-console"],
        *("--backend", f"kind=openai_http,target={job.url},model=twofold-tales"),
        *("--profile", f"kind=concurrent,streams={job.concurrency}"),
        *("--seed", f"kind=static,value={job.seed}"),
        *("--constraint", f"kind=max_requests,count={job.num_requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={bundled_model_path()}"),
        *("--data", f"kind=synthetic_text,{lengths}", "--output", f"kind=json,path={file}"),
    )
    found = json.loads(file.read_text())["benchmarks"][0]["metrics"]

    def figure(name: str) -> dict[str, float]:
        good = found[name]["successful"]
        return {"mean": good["mean"], **good["percentiles"]}

    return Measured(
        completed=found["request_totals"]["successful"],
        failed=found["request_totals"]["errored"],
        output_tokens=figure("output_token_count")["mean"],
        ttft_p50=figure("time_to_first_token_ms")["p50"],
        ttft_p95=figure("time_to_first_token_ms")["p95"],
        itl_mean=figure("inter_token_latency_ms")["mean"],
        request_p50=1e3 * figure("request_latency")["p50"],
        requests_per_s=figure("requests_per_second")["mean"],
    )


def aiperf(job: Job) -> Measured:
    cache = job.folder / "hub"
    if not cache.exists():  # it takes a tokeniser from a Hugging Face cache, not from a folder
        copy = cache / "models--twofold--tales"
        shutil.copytree(
            bundled_model_path(), copy / "snapshots" / "0", ignore=shutil.ignore_patterns("*.safetensors")
        )
        (copy / "refs").mkdir()
        (copy / "refs" / "main").write_text("0")
    _run(
        [program("aiperf") or "aiperf", "profile", "-m", "twofold-tales", "--url", job.url, "--ui", "none"],
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--tokenizer", "twofold/tales", "--output-artifact-dir", str(job.folder / "aiperf")),
        *("--concurrency", str(job.concurrency), "--request-count", str(job.num_requests)),
        *("--synthetic-input-tokens-mean", str(job.input_len), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(job.output_len), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--random-seed", str(job.seed)),
        environment={"HF_HUB_CACHE": str(cache)},
    )
    found = json.loads((job.folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return Measured(
        completed=int(found["request_count"]["avg"]),
        failed=int((found.get("error_request_count") or {"avg": 0})["avg"]),
        output_tokens=found["output_sequence_length"]["avg"],
        ttft_p50=found["time_to_first_token"]["p50"],
        ttft_p95=found["time_to_first_token"]["p95"],
        itl_mean=found["inter_token_latency"]["avg"],
        request_p50=found["request_latency"]["p50"],
        requests_per_s=found["request_throughput"]["avg"],
    )


TOOLS: dict[str, Callable[[Job], Measured]] = {"twofold": ours, "guidellm": guidellm, "aiperf": aiperf}


def program(tool: str) -> str | None:
    """The tool's program; None if it is not installed."""
    named = {"guidellm": os.environ.get("TWOFOLD_GUIDELLM"), "aiperf": os.environ.get("TWOFOLD_AIPERF")}[tool]
    return shutil.which(named or tool)


def _run(command: list[str], *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run a tool to its end, without the network but loopback."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, **offline, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    tools = {name: run for name, run in TOOLS.items() if name == "twofold" or program(name)}
    results: dict[str, list[Measured]] = {name: [] for name in tools}
    serve = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", "0", "--accelerator", "none"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(serve, Path(folder) / "server.log", timeout_s=120) as server,
    ):
        job = Job(server.url, Path(folder), concurrency=args.concurrency)
        ours(job)  # warms the server up
        for seed in range(1, args.rounds + 1):
            for name, run in tools.items():
                results[name].append(run(replace(job, seed=seed)))
    names = [field.name for field in fields(Measured)]
    print(f"medians of {args.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(f"{'':<16}" + "".join(f"{name:>12}" for name in tools))
    for name in names:
        cells = (statistics.median(getattr(one, name) for one in found) for found in results.values())
        print(f"{name:<16}" + "".join(f"{cell:>12.1f}" for cell in cells))


if __name__ == "__main__":
    main()
