"""Options and report of the checks on a GPU. Needs torch with CUDA; --gpu-build: nvcc, cmake, ninja and pybind11 too.

    python3 -m pytest -s -m gpu tests/gpu --gpu-build --gpu-json build/gpu-test.json

What fails stops nothing; the report lists every check with its state ("passed", "failed", "error", "not run"), its
figures, what was expected of them and its seconds. Exit status 1 if one failed, 3 where there is no device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.report import Run, build

BUILD_SECONDS = pytest.StashKey[float]()
RUN = pytest.StashKey[Run]()
NOTHING_RAN = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("checks on a GPU")
    group.addoption("--gpu-build", action="store_true", help="build from source for the GPU at hand first")
    group.addoption("--gpu-dry-run", action="store_true", help="run no check, list them all")
    group.addoption("--gpu-json", type=Path, metavar="FILE", help="where the report goes")
    group.addoption("--gpu-budget-s", type=float, default=570.0, help="no check begins later (default: 570)")
    group.addoption("--gpu-trace", type=Path, help="recorded routing (npz with ids, probs, offsets)")
    group.addoption("--gpu-folder", type=Path, help="where models of random weights are written")


def pytest_cmdline_main(config: pytest.Config) -> None:
    """The build comes before anything imports twofold."""
    began = time.perf_counter()
    if config.getoption("--gpu-build") and not config.getoption("--gpu-dry-run"):
        build()
    config.stash[BUILD_SECONDS] = time.perf_counter() - began


@pytest.fixture(scope="session")
def gpu_run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The run that all checks are part of. Without the options above (a run of all tests): no report, no limit."""
    config = request.config
    run = Run(
        config.getoption("--gpu-json", None),
        build_seconds=config.stash.get(BUILD_SECONDS, 0.0),
        budget_s=config.getoption("--gpu-budget-s", float("inf")),
        dry=config.getoption("--gpu-dry-run", False),
        trace=config.getoption("--gpu-trace", None),
        folder=config.getoption("--gpu-folder", None),
    )
    config.stash[RUN] = run
    yield run
    run.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = session.config.stash.get(RUN, None)
    if run is not None and run.machine is None and session.config.getoption("--gpu-json", None):
        print(f"\nnothing was run: {run.why_nothing_runs}")
        session.exitstatus = 0 if session.config.getoption("--gpu-dry-run") else NOTHING_RAN
