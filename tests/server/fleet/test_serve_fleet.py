"""`twofold serve --ray`: settings of a serve.yaml as arguments, and refusals in one line."""

from __future__ import annotations

import sys

import pytest
from twofold.api.errors import ConfigError
from twofold.api.fleet_config import FleetConfig
from twofold.api.settings import from_namespace
from twofold.tools.cli.main import main
from twofold.tools.cli.serve.fleet import _as_arguments, build, serve_arguments


def test_settings_of_a_file_are_the_flags_of_serve() -> None:
    settings = {
        "model": "m",
        "num_replicas": 3,
        "auto_fit": False,
        "slots_show_prompts": True,
        "api_key": ["a", "b"],
    }
    arguments = ("serve", *_as_arguments(settings))
    assert arguments == (
        *("serve", "m", "--num-replicas", "3", "--no-auto-fit", "--slots-show-prompts"),
        *("--api-key", "a", "--api-key", "b"),
    )
    args = serve_arguments(arguments)
    assert from_namespace(FleetConfig, args).num_replicas == 3
    assert tuple(args.api_key) == ("a", "b")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_ray_is_named_where_it_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'twofold[ray]'" in refusal(capsys, "--ray")


def test_a_flag_for_one_model_is_refused_with_several(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs twofold[ray]")
    assert "it is for one model" in refusal(capsys, "--ray", "a", "b", "--served-model-name", "c")


def test_ranks_are_refused_with_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    reply = "--tensor-parallel-size 2 was given with --ray"
    assert reply in refusal(capsys, "--ray", "-tp", "2")
    with pytest.raises(ConfigError, match=reply):
        build({"model": "m", "ray": True, "tensor_parallel_size": 2})


def test_a_store_that_not_all_replicas_can_write_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs twofold[ray]")
    flags = ("--ray", "--num-replicas", "2", "--telemetry-url")
    assert "they need PostgreSQL" in refusal(capsys, *flags, "sqlite:////tmp/t.db")
    reply = refusal(capsys, *flags, "postgresql+psycopg://user:secret@127.0.0.1:9/t")
    assert "127.0.0.1:9" in reply
    assert "secret" not in reply


def test_fewer_replicas_at_most_than_at_least_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-replicas 1 is less than --num-replicas 2" in refusal(
        capsys, "--ray", "--num-replicas", "2", "--max-replicas", "1"
    )
