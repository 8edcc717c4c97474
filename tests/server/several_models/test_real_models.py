"""Several real models: answers equal those of a model alone, prefixes survive unloading, nothing leaks."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import WAIT_S
from twofold.api.errors import ConfigError
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import from_namespace
from twofold.telemetry import queries
from twofold.tools.cli.hub.several_models import SharedByModels, on_demand_models
from twofold.tools.cli.main import build_parser

from tests.server.several_models.real_server import PROMPT, ask, server
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families, one with recurrent records, and a second size."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "alpha", TinyModel())
    write_tiny_model(root / "beta", tiny("lfm2_moe"))
    write_tiny_model(root / "gamma", TinyModel(num_layers=1))
    return root


def text(answer: dict[str, Any]) -> str:
    reply: str = answer["choices"][0]["text"]
    return reply


@pytest.mark.slow
def test_answers_equal_those_of_each_model_alone_through_evictions(folder: Path) -> None:
    with server(folder, "--models-max", "0") as url:
        alone = {name: text(ask(url, name)) for name in ("alpha", "beta", "gamma")}
    assert len(set(alone.values())) == 3
    names = ["alpha", "beta", "gamma", "alpha", "gamma", "beta"] * 2
    with server(folder, "--models-max", "1") as url, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda name: ask(url, name), names, timeout=WAIT_S))
    assert [text(answer) for answer in answers] == [alone[name] for name in names]
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {24}


@pytest.mark.slow
def test_a_model_that_is_loaded_again_finds_its_prefixes_on_disk(folder: Path, tmp_path: Path) -> None:
    """The second prompt continues the first: recurrent records are kept where a sequence ended."""
    names, longer = ("alpha", "beta", "gamma"), f"{PROMPT} and the fox had a"
    with server(folder, "--models-max", "0") as url:
        alone = {name: text(ask(url, name, longer)) for name in names}
    with server(folder, "--models-max", "1", "--prefix-cache-dir", str(tmp_path / "prefixes")) as url:
        for name in names:
            ask(url, name, max_tokens=1)
        again = {name: ask(url, name, longer) for name in names}
    assert {name: text(answer) for name, answer in again.items()} == alone
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again.values()]
    assert min(found) > 0


def test_models_that_compute_at_once_hinder_no_answer(folder: Path) -> None:
    with server(folder, "--models-max", "0") as url, ThreadPoolExecutor(6) as clients:
        alone = {name: text(ask(url, name)) for name in ("alpha", "beta")}
        names = ["alpha", "beta"] * 3
        answers = clients.map(lambda name: text(ask(url, name)), names, timeout=WAIT_S)
        assert list(answers) == [alone[name] for name in names]


def test_each_load_is_a_run_of_its_own_in_one_database(folder: Path, tmp_path: Path) -> None:
    url_of_database = f"sqlite:///{tmp_path}/t.db"
    with server(folder, "--models-max", "2", telemetry=url_of_database) as url:
        for name in ("alpha", "beta", "alpha", "gamma"):
            ask(url, name)
    db = queries.open_database(url_of_database)
    runs = sorted(queries.runs(db), key=lambda run: run.run_id)
    assert [Path(run.model).name for run in runs] == ["alpha", "beta", "gamma"]
    assert [len(queries.requests(db, run)) for run in runs] == [2, 1, 1]
    assert all(run.finished_s is not None for run in runs)
    db.engine.dispose()


def test_two_models_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "alpha", TinyModel())
    args = build_parser("serve").parse_args(["serve", str(tmp_path / "alpha"), str(folder / "alpha")])
    shared = SharedByModels(from_namespace(ModelsConfig, args), None, lambda: None)
    with pytest.raises(ConfigError, match="both named 'alpha'"):
        on_demand_models(args, shared)


def resources() -> tuple[int, int, int]:
    """Threads, open files, and resident kibibytes of this process."""
    status = Path("/proc/self/status").read_text()
    kib = int(status.split("VmRSS:")[1].split()[0])
    return (
        threading.active_count() + len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        kib,
    )


@pytest.mark.slow
def test_a_hundred_swaps_leak_nothing(folder: Path, tmp_path: Path) -> None:
    with server(folder, "--models-max", "1", "--prefix-cache-dir", str(tmp_path / "prefixes")) as url:

        def swap(times: int) -> None:
            for _ in range(times):
                for name in ("alpha", "beta"):
                    ask(url, name, max_tokens=2)

        swap(10)
        threads, files, kib = resources()
        swap(50)
        assert resources()[:2] == (threads, files)
        assert resources()[2] < kib + 8 * 1024
