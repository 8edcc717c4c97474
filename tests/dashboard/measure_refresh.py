"""Measures a live dashboard in Chromium: first paint, ready, and time and bytes of a refresh, on a file of many rows.

    python -m tests.dashboard.measure_refresh --rows 2000000 [--until FILE]

The file holds a run of 48 layers × 128 experts that goes on while it is watched, with 16 tokens, a request, 96 uploads
and their cache decisions a second, and before it a run of two minutes to compare with.
Prints the machine's load: on a busy machine the times say little. Refreshes are those of the page itself, every two
seconds: from the message with which the browser asks until the last message of the answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from twofold.api.request_record import RequestRecord
from twofold.api.types import StepParts, StepRecord
from twofold.telemetry.sink import (
    CACHE_EVENT_DTYPE,
    TOKEN_LAYER_DTYPE,
    UPLOAD_DTYPE,
    CacheEventKind,
    LoadSample,
    TelemetrySink,
    UploadReason,
)
from twofold.telemetry.writer import open_sink

from dashboard.pages import PAGES
from scripts.headless_chromium import DevTools, Frame, browser, chromium, open_page, wait_until_ready
from tests.dashboard.served_dashboard import served
from tests.dashboard.synthetic_run import ManualClock, run_info

LAYERS, EXPERTS, TOP_K, TOKENS, SLOTS = 48, 128, 8, 16, 1536
UPLOADS = 2 * LAYERS
EXPERT_BYTES = 2_654_208
ROWS_PER_S = LAYERS * TOKENS
SHORT_RUN_S = 120


class LongRun:
    """A run that began `seconds` ago: `catch_up` writes its past, `follow` its present."""

    def __init__(self, sink: TelemetrySink, clock: ManualClock, seconds: int) -> None:
        self._sink, self._clock, self._second = sink, clock, 0
        self._random = np.random.default_rng(0)
        info = run_info(
            "cuda:0",
            num_layers=LAYERS,
            num_experts=EXPERTS,
            top_k=TOP_K,
            num_slots=SLOTS,
            expert_bytes=EXPERT_BYTES,
            host="here",
        )
        clock.now_s = time.time() - seconds - 2 * SHORT_RUN_S
        sink.begin_run(info)
        for _ in range(SHORT_RUN_S):
            self._write()
            clock.now_s += 1
        self._second, clock.now_s = 0, time.time() - seconds
        sink.begin_run(info)

    def catch_up(self) -> None:
        while self._clock.now_s < time.time():
            self._write()
            self._clock.now_s += 1
            while (stats := self._sink.stats()) is not None and stats.num_queued > 300_000:
                time.sleep(0.05)

    def follow(self, over: threading.Event) -> None:
        while not over.wait(1.0):
            self._clock.now_s = time.time()
            self._write()

    def _write(self) -> None:
        second, at_s = self._second, self._clock.now_s
        self._second += 1
        rows = np.zeros(ROWS_PER_S, TOKEN_LAYER_DTYPE)
        rows["step"], rows["request"] = second, second
        rows["layer"] = np.repeat(np.arange(LAYERS), TOKENS)
        rows["position"] = np.tile(np.arange(TOKENS), LAYERS)
        rows["num_routed"], rows["num_hits"], rows["num_cpu"] = TOP_K, 5, 3
        rows["experts"] = self._random.integers(0, EXPERTS, rows["experts"].shape)
        rows["placement"] = self._random.integers(0, 3, rows["placement"].shape)
        rows["layer_us"] = self._random.uniform(50, 90, len(rows))
        self._sink.native_events("token_layer", rows)
        self._write_uploads(second)
        parts = StepParts(experts_cpu_us=400e3, attention_us=300e3, router_us=50e3, head_us=40e3)
        self._sink.step(StepRecord(second, at_s, 0, TOKENS, 1, 0, 9e5, 9e5, parts))
        self._sink.request(
            RequestRecord(
                number=second,
                request_id=f"chatcmpl-{second}",
                endpoint="/v1/chat/completions",
                received_s=at_s,
                submitted_s=at_s,
                first_token_s=at_s + 0.1,
                finished_s=at_s + 0.9,
                prompt_tokens=1,
                completion_tokens=TOKENS,
                finish_reason="stop",
                decode_s=0.8,
            )
        )
        self._sink.load_samples(
            [
                LoadSample(
                    loadtest_id="lt-1",
                    finished_s=at_s,
                    user=second % 8,
                    num_users=8,
                    e2e_ms=900.0,
                    ok=True,
                    ttft_ms=100.0,
                    tpot_ms=50.0,
                    completion_tokens=TOKENS,
                )
            ]
        )

    def _write_uploads(self, second: int) -> None:
        """Two uploads per layer into slots that go round, each with an admission and an eviction."""
        layer = np.repeat(np.arange(LAYERS), UPLOADS // LAYERS)
        expert = self._random.integers(0, EXPERTS, UPLOADS)
        at_us = second * 9e5 + np.arange(UPLOADS) * 100.0
        copies = np.zeros(UPLOADS, UPLOAD_DTYPE)
        copies["step"], copies["request"], copies["layer"], copies["expert"] = second, -1, layer, expert
        copies["slot"] = (second * UPLOADS + np.arange(UPLOADS)) % SLOTS
        copies["size_bytes"], copies["reason"] = EXPERT_BYTES, UploadReason.DEMAND
        copies["queued_us"], copies["begin_us"], copies["end_us"] = at_us, at_us + 2, at_us + 102
        self._sink.native_events("upload", copies)
        events = np.zeros(2 * UPLOADS, CACHE_EVENT_DTYPE)
        events["step"], events["request"], events["layer"] = second, -1, np.repeat(layer, 2)
        events["kind"] = np.tile([CacheEventKind.ADMIT, CacheEventKind.EVICT], UPLOADS)
        events["expert"] = np.stack([expert, (expert + 37) % EXPERTS], axis=1).ravel()
        events["slot"], events["at_us"] = np.repeat(copies["slot"], 2), np.repeat(at_us, 2)
        self._sink.native_events("cache_event", events)


def refreshes(frames: list[Frame]) -> list[tuple[float, int]]:
    """(milliseconds, bytes) from each message that asks to the last one before the next that asks."""
    requested = [index for index, frame in enumerate(frames) if frame.is_sent]
    found = []
    for begin, end in zip(requested, [*requested, len(frames)][1:], strict=True):
        answer = frames[begin + 1 : end]
        if answer:
            found.append(
                ((answer[-1].at_s - frames[begin].at_s) * 1e3, sum(frame.num_bytes for frame in answer))
            )
    return found


def measure(tools: DevTools, url: str, seconds: float) -> str:
    begun_s = time.monotonic()
    open_page(tools, url)
    wait_until_ready(tools, url)
    ready_s = time.monotonic() - begun_s
    paint_ms = tools.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    before = len(tools.seen.frames)
    for _ in range(round(2 * seconds)):  # events arrive with the answers to commands
        time.sleep(0.5)
        tools.evaluate("1")
    found = refreshes(tools.seen.frames[before:])
    if not found:
        return f"first paint {paint_ms or 0:5.0f} ms, ready {ready_s:4.1f} s, does not refresh"
    took, size = (np.array(values) for values in zip(*found, strict=True))
    return (
        f"first paint {paint_ms or 0:5.0f} ms, ready {ready_s:4.1f} s, {len(found)} refreshes: "
        f"median {np.median(took):4.0f} ms, longest {took.max():4.0f} ms, {np.median(size) / 1e3:5.1f} kB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000, help="token × layer rows of the file")
    parser.add_argument("--pages", default=",".join(page.name for page in PAGES))
    parser.add_argument("--window", default="5m")
    parser.add_argument("--seconds", type=float, default=12.0, help="each page is watched on each visit")
    parser.add_argument("--until", type=Path, help="begin to measure when this file exists")
    args = parser.parse_args()
    program = chromium()
    if program is None:
        print("no Chromium found; install it (apt-get install chromium)", file=sys.stderr)
        return 2
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder) / "t.db", ManualClock()
        sink = open_sink(f"sqlite:///{path}", max_queued_rows=1 << 20, max_bytes=1 << 36, now=clock)
        run = LongRun(sink, clock, args.rows // ROWS_PER_S)
        begun_s = time.monotonic()
        run.catch_up()
        size = path.stat().st_size / 1e6
        print(
            f"{args.rows:,} rows, {size:,.0f} MB, written in {time.monotonic() - begun_s:.0f} s", flush=True
        )
        while args.until and not args.until.exists():
            time.sleep(0.5)
            run.catch_up()
        writer = threading.Thread(target=run.follow, args=(over,), daemon=True)
        writer.start()
        with served(path, Path(folder)) as url, browser(program) as tools:
            for name in args.pages.split(","):
                path_of = "" if name == PAGES[0].name else name
                for visit in ("first", "second"):
                    result = measure(tools, f"{url}/{path_of}?window={args.window}", args.seconds)
                    print(f"{name:10s} {visit:6s} load {os.getloadavg()[0]:4.1f}: {result}", flush=True)
        over.set()
        writer.join()
        sink.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
