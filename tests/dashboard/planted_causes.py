"""Steps that are slow for a known reason: a real engine in a process of its own, which plants the reason.

`python -m tests.dashboard.planted_causes --trials 200` plants each cause that often, prints which cause the dashboard
names for each, and how often it names one in steps without a plant.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

PLANTS: Final = {
    "busy core": "none",
    "stopped": "none",
    "prompt": "none",
    "collection": "none",
    "pinned thread": "none",
    "lock": "none",
    "disk": "packed",
    "cold cache": "emulated",
    "slow link": "emulated",
}
"""The plants, and the engine: of the CPU alone, with weights mapped from a file, or with an emulated GPU."""
WALL: Final = ("busy core", "stopped", "prompt", "collection", "pinned thread", "lock", "disk")
"""Plants that the wall clock shows, also of an engine with an emulated GPU."""
BESIDE: Final = 130
"""Steps before a planted one, with which it is compared."""
_SPIN: Final = (
    "import os, sys, time\nos.sched_setaffinity(0, {%d})\nprint(flush=True)\nend = time.monotonic() + %f\n"
)
_STOP: Final = (
    "import os, signal, sys, time\n"
    "for _ in sys.stdin:\n"
    "    os.kill(os.getppid(), signal.SIGSTOP); time.sleep(0.05); os.kill(os.getppid(), signal.SIGCONT)\n"
)


class Planted:
    """An engine whose steps the calling thread computes, one by one."""

    def __init__(self, how: str, url: str, folder: Path) -> None:
        from twofold.api.config import EngineConfig
        from twofold.engine import Engine
        from twofold.models.bundled import bundled_model_path
        from twofold.telemetry.writer import open_sink

        self._sink = open_sink(url)
        config = EngineConfig(
            model=str(_packed(folder) if how == "packed" else bundled_model_path()),
            accelerator=f"emulated:{_weak_cpu(folder)}" if how == "emulated" else "none",
            gpu_experts_ratio=0.75 if how == "emulated" else None,
            policy="lru",
            max_itl_ms=1000.0,  # a prompt is computed in one step
        )
        self.engine = Engine.load(config, telemetry=self._sink)
        self._forward = self.engine.runner.forward
        self._before: Callable[[], None] | None = None
        self.engine.runner.forward = self._with_plant  # type: ignore[method-assign]
        self._num_requests = 0
        self._heap = [[index] for index in range(600_000)]
        gc.freeze()  # a collection finds nothing until a plant shows it the heap
        self._stopper: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._stopper is not None and self._stopper.stdin is not None:
            self._stopper.stdin.close()
            self._stopper.wait()
        self.engine.close()
        self._sink.close()

    def _with_plant(self, *given: object, **named: object) -> object:
        plant, self._before = self._before, None
        if plant is not None:
            plant()
        return self._forward(*given, **named)  # type: ignore[arg-type]

    def steps(self, count: int) -> list[int]:
        """Compute so many steps of one answer; their numbers."""
        found = []
        while len(found) < count:
            if not self.engine.stats().num_running:
                self.submit(range(100, 120), 400)
            number = self.engine.stats().num_steps
            if self.engine.step():
                found.append(number)
        return found

    def submit(self, prompt: range, max_tokens: int) -> None:
        from twofold.api.types import GenerationRequest, SamplingParams

        self._num_requests += 1
        shift = self._num_requests % 200
        sampling = SamplingParams(
            temperature=0.8, seed=self._num_requests, max_tokens=max_tokens, ignore_eos=True
        )
        tokens = tuple(token + shift for token in prompt)
        self.engine.submit(GenerationRequest(tokens, sampling, lambda _: None, f"r{self._num_requests}"))

    # ---- plants: each returns the steps of which the slowest one is judged ------------------------------------------

    def plant(self, kind: str) -> list[int]:
        named = {
            "busy core": self._busy_core,
            "stopped": self._stopped,
            "prompt": self._prompt,
            "collection": self._collection,
            "pinned thread": self._pinned,
            "lock": self._lock,
            "disk": self._disk,
            "cold cache": self._cold_cache,
            "slow link": self._slow_link,
        }
        return named[kind]()

    def _busy_core(self) -> list[int]:
        cores = sorted(os.sched_getaffinity(0))
        with spinning([core for core in cores for _ in range(3)], 0.15):
            return self._while_s(0.12)

    def _pinned(self) -> list[int]:
        cores = os.sched_getaffinity(0)
        core = min(cores)
        with spinning([core] * 3, 0.15):
            os.sched_setaffinity(0, {core})
            try:
                return self._while_s(0.12)
            finally:
                os.sched_setaffinity(0, cores)

    def _while_s(self, duration_s: float) -> list[int]:
        end_s, found = time.monotonic() + duration_s, []
        while time.monotonic() < end_s:
            found += self.steps(1)
        return found

    def _stopped(self) -> list[int]:
        if self._stopper is None:
            self._stopper = subprocess.Popen([sys.executable, "-c", _STOP], stdin=subprocess.PIPE, text=True)
            time.sleep(0.2)
        pipe = self._stopper.stdin
        assert pipe is not None

        def stop() -> None:
            last_s = begun_s = time.perf_counter()
            pipe.write("\n")
            pipe.flush()
            while (now_s := time.perf_counter()) - last_s < 0.03 and now_s - begun_s < 1.0:
                last_s = now_s
                time.sleep(0.001)

        return self._planted_step(stop)

    def _planted_step(self, plant: Callable[[], None]) -> list[int]:
        with undisturbed():
            self._before = plant
            return self.steps(1)

    def _prompt(self) -> list[int]:
        with undisturbed():
            self.submit(range(300, 810), 1)
            return self.steps(2)

    def _collection(self) -> list[int]:
        def collect() -> None:
            gc.unfreeze()
            gc.collect()
            gc.freeze()

        return self._planted_step(collect)

    def _lock(self) -> list[int]:
        """Another thread holds the interpreter's lock for 50 ms: sorting lets it go only at its end."""
        import threading

        values = list(np.random.default_rng(1).random(60_000))
        holds = threading.Event()

        def hold() -> None:
            holds.set()
            values.sort()

        def plant() -> None:
            thread = threading.Thread(target=hold)
            thread.start()
            holds.wait()
            time.sleep(0)
            thread.join()

        return self._planted_step(plant)

    def _disk(self) -> list[int]:
        """The weights leave the page cache: the mapping's pages first, which would keep those of the file."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

        def drop() -> None:
            files = set()
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
                fields = line.split()
                if len(fields) < 6 or not fields[5].startswith(str(self.engine.config.model)):
                    continue
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                libc.madvise(begin, end - begin, 4)  # MADV_DONTNEED
                files.add(fields[5])
            assert files, "no weights are mapped"
            for path in files:
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

        return self._planted_step(drop)

    def _cold_cache(self) -> list[int]:
        """Allocate the slots again: they are empty."""
        moe = self.engine.runner.moe
        num_slots = moe.num_slots
        moe.release()
        moe._saved_cache = b""
        moe.allocate(num_slots)
        return self.steps(1)

    def _slow_link(self) -> list[int]:
        """The same slots hold the same experts behind a link of a hundredth of the speed."""
        moe = self.engine.runner.moe
        cost, num_slots = moe.cost, moe.num_slots
        moe.cost = _with_slow_link(moe)
        moe.release()
        moe.allocate(num_slots)
        found = self.steps(8)  # not every one uploads
        moe.cost = cost
        moe.release()
        moe.allocate(num_slots)
        return found


@contextmanager
def undisturbed() -> Iterator[None]:
    """Where it is allowed, this process comes before all others of the machine: what they do is no plant."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    try:
        for thread in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
        yield
    finally:
        for thread in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def spinning(cores: list[int], duration_s: float) -> Iterator[None]:
    """Processes that compute, one for each entry of `cores`, for so long."""
    text = _SPIN + "while time.monotonic() < end: pass\n"
    found = [
        subprocess.Popen([sys.executable, "-c", text % (core, duration_s)], stdout=subprocess.PIPE)
        for core in cores
    ]
    try:
        for process in found:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _packed(folder: Path) -> Path:
    from twofold.blocks import ops
    from twofold.engine.packing import pack_directory
    from twofold.models.bundled import bundled_model_path
    from twofold.models.model_files import open_model_files

    source = bundled_model_path()
    assert pack_directory(open_model_files(source), source, folder / "packed", ops.ThreadPool(2))
    return folder / "packed"


def _weak_cpu(folder: Path) -> Path:
    """A machine profile whose CPU is so slow that a miss is fetched."""
    from twofold.experts.profiles import load_profile

    profile = load_profile("rtx4090-pcie4")
    path = folder / "weak-cpu.json"
    path.write_text(_with(profile, cpu_expert_overhead_us=60.0).to_json(), encoding="utf-8")
    return path


def _with(profile: Any, **figures: float) -> Any:
    changed = {
        name: dataclasses.replace(profile.figures[name], value=value) for name, value in figures.items()
    }
    return dataclasses.replace(profile, figures=profile.figures | changed)


def _with_slow_link(moe: Any) -> Any:
    from twofold.experts.cpu_cost import machine_cost_model

    return machine_cost_model(_with(moe.choice.profile, link_latency_us=300.0), moe.store, None)


# ---- trials ----------------------------------------------------------------------------------------------------------


def run(how: str, kinds: list[str], num_trials: int, folder: Path) -> dict[str, list[list[int]]]:
    """Steps of each trial by kind, "quiet" too; the database is `t.db` in the folder."""
    planted = Planted(how, f"sqlite:///{folder / 't.db'}", folder)
    found: dict[str, list[list[int]]] = {kind: [] for kind in (*kinds, "quiet")}
    planted.steps(BESIDE)
    for _ in range(num_trials):
        for kind in kinds:
            planted.steps(BESIDE)
            with undisturbed():
                found["quiet"].append(planted.steps(2)[1:])
            found[kind].append(planted.plant(kind))
    planted.close()
    return found


def named(db: Any, run_: Any, steps: list[int], *, emulated: bool) -> tuple[float, str | None]:
    """Ratio to the usual time of the slowest of these steps, and the cause that the dashboard names for it."""
    from twofold.telemetry import queries

    from dashboard import causes

    numbers, table = queries.step_table(db, run_, steps[0], steps[-1])
    slowest = int(numbers[int(table["step_us" if emulated else "wall_us"].argmax())])
    beside = (*range(max(0, steps[0] - BESIDE), steps[0]), slowest)
    figures = queries.figures_of_steps(db, run_, beside, slowest)
    assert figures is not None
    step, usual = figures
    cause = (causes.emulated_cause if emulated else causes.cause_of)(step, usual)
    ratio = (
        step.times.emulated_us / usual.times.emulated_us
        if emulated
        else step.times.wall_us / usual.times.wall_us
    )
    return ratio, None if cause is None else cause.kind


def judged(
    folder: Path, found: dict[str, list[list[int]]], how: str
) -> dict[str, list[tuple[float, str | None]]]:
    """(ratio, cause named) of each trial by kind."""
    from twofold.telemetry import queries

    db = queries.open_database(f"sqlite:///{folder / 't.db'}")
    (run_,) = queries.runs(db)
    return {
        kind: [named(db, run_, steps, emulated=how == "emulated" and kind not in WALL) for steps in trials]
        for kind, trials in found.items()
    }


def trials(
    how: str, kinds: list[str], num_trials: int, folder: Path
) -> dict[str, list[tuple[float, str | None]]]:
    """Plant in a separate process, because stops and collections affect a whole process. Judge what it recorded."""
    given = [how, ",".join(kinds), str(num_trials), str(folder)]
    process = subprocess.run(
        [sys.executable, "-m", "tests.dashboard.planted_causes", "--run", *given],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return judged(folder, json.loads(process.stdout.splitlines()[-1]), how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--only", choices=PLANTS, action="append")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        how, kinds, count, folder = args.run
        print(json.dumps(run(how, kinds.split(","), int(count), Path(folder))))
        return
    for kind in args.only or PLANTS:
        with tempfile.TemporaryDirectory() as folder:
            found = trials(PLANTS[kind], [kind], args.trials, Path(folder))
        for name, results in found.items():
            counts = Counter(cause for ratio, cause in results if ratio >= 1.15)
            as_usual = [cause for ratio, cause in results if ratio < 1.15]
            assert not any(as_usual)
            print(f"{kind:14s} {name:14s} {len(as_usual):4d} as usual, longer: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
