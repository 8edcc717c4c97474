"""Each bad input: one line that names it and the remedy, exit code 2, no traceback, nothing left listening."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold.tools.cli.main import main

from tests.e2e.ports import free_port, is_listening
from tests.tiny_models.writing import TinyModel, write_tiny_model


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def relabel_dtype(path: Path) -> None:
    """Says I32 where the header said F32: as large, but nothing that weights can be."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"F32"', b'"I32"', 1))


def remove_a_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[-1].unlink()


def forget_a_shard(directory: Path) -> None:
    """A tensor that the index does not list."""
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].pop(sorted(content["weight_map"])[-1])
    index.write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (remove_a_shard, "safetensors"),
    "truncated weights": (lambda d: truncate(d / "model.safetensors"), "model.safetensors"),
    "wrong dtype": (lambda d: relabel_dtype(d / "model.safetensors"), "I32"),
    "unknown architecture": (
        lambda d: edit_json(d / "config.json", architectures=["GptFooForCausalLM"]),
        "GptFoo",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text('{"model": 3}'), "tokenizer.json"),
    "broken template": (
        lambda d: edit_json(d / "tokenizer_config.json", chat_template="{% for m in %}"),
        "Jinja",
    ),
    "broken generation config": (
        lambda d: edit_json(d / "generation_config.json", temperature="hot"),
        "generation_config.json",
    ),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which `arguments` are refused."""
    try:
        code: object = main(arguments)
    except SystemExit as refusal:
        code = refusal.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith(f"twofold {arguments[0]}: ")
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_by_generate_and_serve(tiny, capsys, damage):
    apply, words = DAMAGES[damage]
    apply(tiny)
    assert words in refused(capsys, "generate", str(tiny), "--prompt", "hi", "--accelerator", "none")
    port = free_port()
    assert words in refused(capsys, "serve", str(tiny), "--port", str(port), "--accelerator", "none")
    assert not is_listening(port)


@pytest.mark.parametrize("damage", [remove_a_shard, forget_a_shard])
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path, capsys, damage):
    model = write_tiny_model(tmp_path / "sharded", TinyModel(num_shards=3))
    damage(model)
    assert str(model) in refused(capsys, "generate", str(model), "--prompt", "hi", "--accelerator", "none")


def test_no_such_model(capsys):
    assert "/no/such/model" in refused(capsys, "generate", "/no/such/model", "--prompt", "hi")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpu-experts-ratio", "1.5"), "--gpu-experts-ratio was given 1.5"),
        (("--gpu-experts-ratio", "much"), "'much'"),
        (("--num-gpu-experts", "99", "--accelerator", "emulated:rtx4090-pcie4"), "99"),
        (("--accelerator", "tpu"), "'tpu'"),
        (("--accelerator", "emulated:rtx9999"), "rtx9999"),
        (("--policy", "clairvoyant", "--accelerator", "emulated:rtx4090-pcie4"), "clairvoyant"),
        (("--policy", "clairvoyant", "--accelerator", "none"), "clairvoyant"),
        (("--policy", "belady", "--accelerator", "none"), "it needs future routing"),
        (("--policy", "static", "--prefetch", "on", "--accelerator", "none"), "--prefetch on"),
        (("--max-model-len", "999999"), "999999"),
        (("--telemetry-url", "sqlite:////no/such/directory/t.db"), "/no/such/directory"),
        (("--telemetry-url", "nonsense"), "nonsense"),
    ],
)
def test_a_setting_that_cannot_be_met_is_refused_by_generate_and_serve(tiny, capsys, flags, words):
    assert words in refused(capsys, "generate", str(tiny), "--prompt", "hi", *flags)
    assert words in refused(capsys, "serve", str(tiny), "--port", str(free_port()), *flags)


def test_a_read_only_database_is_refused_before_the_model_is_loaded(tiny, tmp_path, capsys, monkeypatch):
    database = tmp_path / "telemetry.db"
    database.touch()
    database.chmod(0o444)
    if os.access(database, os.W_OK):
        # root may write any file, so a directory takes the file's place: it cannot be written.
        database.unlink()
        database.mkdir()
    monkeypatch.setattr("twofold.engine.Engine.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert str(database) in refused(
        capsys, "serve", str(tiny), "--port", str(free_port()), "--telemetry-url", f"sqlite:///{database}"
    )


def test_a_port_in_use_is_refused_before_the_model_is_loaded(tiny, capsys, monkeypatch):
    monkeypatch.setattr("twofold.engine.Engine.load", lambda *_, **__: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in refused(capsys, "serve", str(tiny), "--port", str(port))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt", "word " * 400), "context"),
        (("--prompt", "  "), "--prompt"),
        (("--prompt", "hi", "--temperature", "-1"), "--temperature"),
        (("--prompt", "hi", "--top-p", "2"), "--top-p"),
        (("--prompt", "hi", "--max-tokens", "0"), "--max-tokens"),
        (("--prompt", "hi", "--max-tokens", "1.5"), "--max-tokens"),
        (("--prompt", "hi", "--temperature", "nan"), "--temperature"),
        (("--prompt", "hi", "--raw", "--system", "be brief"), "--system"),
    ],
)
def test_a_prompt_or_a_sampling_flag_that_cannot_be_is_refused(tiny, capsys, flags, words):
    assert words in refused(capsys, "generate", str(tiny), "--accelerator", "none", *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt-tokens", "99999"), "99999"),
        (("--prompt-tokens", "250", "--new-tokens", "50"), "50"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(tiny, capsys, flags, words):
    assert words in refused(
        capsys, "bench", str(tiny), "--accelerator", "none", "--no-compare-transformers", *flags
    )
