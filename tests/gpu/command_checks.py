"""The commands on a card: `bench` and `generate` of the bundled model, its logits by placement, and a real `serve`."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.scheduler import Scheduler
from twofold.models.bundled import bundled_model_path
from twofold.step.sequences import Sequence
from twofold.tools.cli.main import main

from benchmarks.gpu.machine import CannotRunError, Machine, expect
from tests.engine.scripted_sampler import ScriptedSampler
from tests.gpu.engine_checks import F32, NATURAL_LIMIT, error_of
from tests.gpu.packages import IMPORTED_BY_SERVE

PROMPT = "Once upon a time there was a miller who had three sons, his mill, a donkey and a cat."
SHARES = (0.0, 0.25, 1.0)
_START_S, _STOP_S = 60.0, 20.0


def _flags(share: float | None) -> list[str]:
    """share: of the experts in slots; None: no GPU."""
    return (
        ["--accelerator", "none"]
        if share is None
        else ["--accelerator", "cuda", "--gpu-experts-ratio", str(share)]
    )


def _run(arguments: list[str]) -> Any:
    """The JSON that a command of this process prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*arguments, "--json"])
    if status:
        raise AssertionError(
            f"twofold {' '.join(arguments)} ended with status {status}; its reason is in the log"
        )
    return json.loads(out.getvalue())


def _generate_flags(machine: Machine) -> list[str]:
    return [
        "--prompt",
        PROMPT,
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        str(machine.sizes.answer_tokens),
    ]


def generate_as_a_process(machine: Machine) -> dict[str, Any]:
    """A quarter of the experts in slots, from the start of the process to its end."""
    command = [*machine.program, "generate", *_generate_flags(machine), *_flags(0.25), "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"ended with status {done.returncode}: {done.stderr[-500:]}")
    answer = json.loads(done.stdout)
    figures = {
        "seconds": time.perf_counter() - began, "decode_tokens_per_s": answer["timings"]["decode_tokens_per_s"],
        "placement": answer["placement"], "text": answer["text"][:80],
    }  # fmt: skip
    return expect(figures, answer["accelerator"] == "cuda", "the answer comes from the card")


def bench_and_generate(machine: Machine, share: float | None) -> dict[str, Any]:
    """Speed by `bench`, and an answer by `generate`."""
    sizes = machine.sizes
    lengths = ["--prompt-tokens", str(sizes.prompt_tokens), "--new-tokens", str(sizes.answer_tokens)]
    off = ["--no-compare-transformers", "--no-ceilings", "--no-profile", "--repeats", "2"]
    speed = _run(["bench", *lengths, *off, *_flags(share)])["twofold"]
    answer = _run(["generate", *_generate_flags(machine), *_flags(share)])
    figures = {
        "decode_tokens_per_s": speed["decode_tokens_per_s"], "prefill_tokens_per_s": speed["prefill_tokens_per_s"],
        "placement": answer["placement"], "text": answer["text"][:80],
    }  # fmt: skip
    named = "none" if share is None else "cuda"
    tokens = answer["usage"]["completion_tokens"]
    return expect(figures, answer["accelerator"] == named and tokens > 0, f"an answer by {named}")


def _logits(machine: Machine, share: float | None) -> F32:
    """Logits [tokens, vocabulary] of the bundled model with a fixed continuation, whatever it would have said."""
    placement = {} if share is None else {"gpu_experts_ratio": share}
    config = EngineConfig(accelerator="none" if share is None else "cuda", max_total_tokens=512, **placement)  # type: ignore[arg-type]
    engine = Engine.load(config)
    try:
        prompt = engine.tokenizer.encode(PROMPT)
        reported = np.random.default_rng(4).integers(0, engine.vocab_size, machine.sizes.logit_tokens)
        sampler = ScriptedSampler(reported.tolist())
        scheduler = Scheduler(engine._pool, 1, 512)
        request = GenerationRequest(tuple(prompt), SamplingParams(), lambda chunk: None, "told")
        scheduler.add(Sequence(0, request, list(prompt), 256))
        for step in range(len(reported)):
            schedule = scheduler.schedule()
            (picked,) = engine.runner.forward(step, schedule, [sampler])
            (item,) = schedule.items
            item.sequence.num_computed += item.num_tokens
            item.sequence.token_ids.append(picked)
        scheduler.finish(item.sequence)
    finally:
        engine.close()
    return np.stack(sampler.seen)


def logits_by_placement(machine: Machine) -> dict[str, Any]:
    """Each share of slots against `--accelerator none`. Logits of the same tokens, because sums differ in order."""
    reference = _logits(machine, None)
    figures: dict[str, Any] = {}
    for share in SHARES:
        ours = _logits(machine, share)
        each = [error_of(a, b) for a, b in zip(ours, reference, strict=True)]
        figures[f"{share:.0%} slots"] = {
            "median_relative_error": float(np.median(each)), "worst": max(each),
            "same_first_choice": float(np.mean(ours.argmax(1) == reference.argmax(1))),
        }  # fmt: skip
    worst = max(each["median_relative_error"] for each in figures.values())
    return expect(figures, worst <= NATURAL_LIMIT, f"median error of at most {NATURAL_LIMIT}")


def why_no_server() -> str:
    """Packages that `serve` lacks here; "": none."""
    missing = [name for name in IMPORTED_BY_SERVE if importlib.util.find_spec(name) is None]
    return (
        f"serve needs {', '.join(missing)}; give WHEELS=, a folder made by make gpu-wheels" if missing else ""
    )


@contextlib.contextmanager
def _served(machine: Machine) -> Iterator[tuple[subprocess.Popen[bytes], http.client.HTTPConnection, float]]:
    """`serve` as a process of its own, a connection to it, and the seconds until it was ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen([*machine.program, "serve", "--port", str(port), *_flags(0.25)])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        while not _is_ready(connection):
            if process.poll() is not None or time.perf_counter() - began > _START_S:
                raise AssertionError("serve did not get ready; its reason is in the log")
            time.sleep(0.1)
        yield process, connection, time.perf_counter() - began
    finally:
        connection.close()
        process.kill()
        process.wait()


def _is_ready(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except OSError:
        connection.close()
        return False


def serve_and_stream(machine: Machine) -> dict[str, Any]:
    """A streamed chat, then SIGTERM: the server says that it is ready, streams tokens and ends by itself."""
    if missing := why_no_server():
        raise CannotRunError(missing)
    body = {
        "model": bundled_model_path().name, "stream": True, "max_tokens": machine.sizes.answer_tokens, "temperature": 0,
        "messages": [{"role": "user", "content": "Tell me the story of a clever fox."}],
    }  # fmt: skip
    with _served(machine) as (process, connection, ready_s):
        began = time.perf_counter()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        times = [time.perf_counter() - began for line in answer if line.startswith(b"data: {")]
        status = answer.status
        stopping = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait(_STOP_S)
        stop_s = time.perf_counter() - stopping
    figures = {
        "ready_s": ready_s, "status": status, "chunks": len(times), "first_chunk_s": times[0] if times else None,
        "last_chunk_s": times[-1] if times else None, "stop_s": stop_s, "exit_status": code,
    }  # fmt: skip
    return expect(
        figures, status == 200 and len(times) > 1 and code == 0, "200, more than one chunk, exit status 0"
    )
