"""`twofold finetune`: it learns, goes on where it was interrupted, its adapter is served, and errors take one line."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import text
from twofold.adapters.reading import read_adapter
from twofold.step.adapters import ModelAdapters
from twofold.telemetry import queries
from twofold.tools.cli.main import main
from twofold.training import open_base
from twofold.training.finetune import checkpoints, run
from twofold.training.finetune.batches import packs_exactly

from tests.engine.model_runs import load, random_prompt
from tests.models.transformers_runs import one_torch_thread, reference, reference_logits
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

STEPS = 12
SECONDS = 3.0
"""About the time of a run, from the first step on."""
ARGUMENTS = (
    f"--max-steps {STEPS} --batch-tokens 200 --learning-rate 0.02 --rank 3 --cpu-threads 1 --save-steps 3 "
    "--eval-steps 4 --eval-share 0.1 --gradient-accumulation 2"
).split()


class Killed(BaseException):
    """Ends a run wherever it is, as a signal would."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), EXAMPLES["qwen2_moe"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{rng.choice(['Say', 'Tell'])} {word}"},
                {"role": "assistant", "content": f"the {word} and the thing. Tra-la!"},
            ]
        }
        for word in rng.choices(["cat", "king", "hill", "sea"], k=40)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("finished") / "tra-la"
    recorded = ["--telemetry-url", f"sqlite:///{out.with_name('t.db')}"]
    assert main(["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS, *recorded]) == 0
    return out


def curve(out: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((out / run.LOG_FILE).read_text())
    return entries


def test_an_emulated_card_changes_no_bit_and_its_times_are_called_virtual(
    finished: Path, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "emulated"
    arguments = ["--accelerator", "emulated:rtx4090-pcie4", *ARGUMENTS]
    assert main(["finetune", str(model), "--data", str(data), "--out", str(out), *arguments]) == 0
    assert curve(out) == curve(finished)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "of the rows" in line)
    assert line.startswith("emulated:rtx4090-pcie4: ")
    assert line.endswith("on its virtual clock; the CPU computed them")


def test_a_gguf_file_is_trained_with_the_configuration_of_a_directory(
    finished: Path, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", EXAMPLES["qwen2_moe"])
    command = ["finetune", str(file), "--data", str(data), "--out", str(tmp_path / "out"), *ARGUMENTS]
    assert main(command) == 2
    assert "or a GGUF file and --config" in capsys.readouterr().err
    assert main([*command, "--config", str(model)]) == 0
    assert f"twofold serve {file} --lora-modules out=" in capsys.readouterr().out
    losses, expected = (
        [e["loss"] for e in curve(out) if "loss" in e] for out in (tmp_path / "out", finished)
    )
    assert losses == pytest.approx(expected, abs=1e-3)


def assert_same(out: Path, finished: Path) -> None:
    assert curve(out) == curve(finished)
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (out, finished))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_held_out_loss_falls_and_the_command_names_how_to_serve(
    model: Path, data: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [entry["eval_loss"] for entry in curve(finished) if "eval_loss" in entry]
    before = json.loads((finished / run.SETTINGS_FILE).read_text())["loss_before"]
    assert len(losses) == 3
    assert min(losses) < 0.6 * before
    assert main(["finetune", str(model), "--data", str(data), "--out", str(finished), *ARGUMENTS]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"twofold serve {model} --lora-modules tra-la={finished} --cpu-threads 1\n"
    assert "is complete already" in captured.err


def test_the_run_is_recorded_step_by_step(finished: Path) -> None:
    db = queries.open_database(f"sqlite:///{finished.with_name('t.db')}")
    (run,) = queries.runs(db)
    assert (run.kind, run.state(), run.num_layers, run.num_experts) == ("training", "ended", 2, 9)
    steps, logged = queries.training_steps(db, run), curve(finished)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        expected = [entry[name] for entry in logged if name in entry]
        values = getattr(steps, name)
        assert values[~np.isnan(values)].tolist() == expected, name
    assert steps.step[~np.isnan(steps.eval_loss)].tolist() == [4, 8, 12]
    assert (steps.memory_bytes > 1e8).all()
    progress = queries.training_progress(db, run)
    assert progress is not None
    assert (progress.step, progress.num_steps, progress.remaining_s) == (STEPS, STEPS, 0)
    # Evaluations and the measured micro-steps before training are not counted.
    tokens = db.rows(text("SELECT sum(num_tokens) FROM training_step"))[0][0]
    assert queries.training_load(db, run).sum(axis=1).tolist() == [run.top_k * tokens] * run.num_layers


def test_the_adapter_is_served_by_the_same_process(
    model: Path,
    data: Path,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(words))
    command = ["finetune", str(model), "--data", str(data), "--out", str(finished), *ARGUMENTS, "--serve"]
    assert main([*command, "--", "--port", "8123"]) == 0
    words = [
        "serve",
        str(model),
        "--lora-modules",
        f"tra-la={finished}",
        "--cpu-threads",
        "1",
        "--port",
        "8123",
    ]
    assert started == [[sys.executable, "-m", "twofold.tools.cli", *words]]
    assert capsys.readouterr().out == f"twofold {' '.join(words)}\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--serve", "--", "--prot", "8"], "--port"), (["--", "--port", "8"], "give --serve")],
)
def test_flags_of_serve_are_checked_before_training(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    message: str,
) -> None:
    out = tmp_path / "out"
    assert code_of(["finetune", str(model), "--data", str(data), "--out", str(out), *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_the_adapter_serves_as_in_peft(model: Path, finished: Path) -> None:
    prompt = random_prompt(40)
    expected = reference_logits(peft.PeftModel.from_pretrained(reference(model), finished).eval(), prompt)
    runner = load(model)
    steps, parts = runner.model.adapters, runner.model
    adapters = ModelAdapters(parts.files, steps, runner.moe.store, parts.lm_head, parts.pool)
    adapters.put(0, adapters.prepare(read_adapter(finished, adapters.shapes)))
    steps.set([0] * len(prompt))
    hidden = runner.step((runner.sequence(len(prompt)), prompt))[0]
    steps.set([0] * len(prompt))
    found = runner.logits(hidden)
    assert abs(found - expected).max() < 1e-4 * max(1.0, abs(expected).max() / 16)
    assert abs(expected - reference_logits(reference(model), prompt)).max() > 0.05


def test_activations_computed_again_give_the_same_bits(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS]
    assert main([*command, "--activation-bytes", "0"]) == 0
    assert_same(out, finished)


@pytest.mark.parametrize(("family", "packs"), [("qwen3_moe", True), ("lfm2_moe", False)])
def test_sequences_are_packed_where_they_do_not_meet_also_in_bfloat16(
    tmp_path: Path, family: str, packs: bool
) -> None:
    base = open_base(write_tiny_model(tmp_path, EXAMPLES[family]), dtype=torch.bfloat16)
    assert packs_exactly(base.model, 300) == packs


def interrupting(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Let the next run end at a place, without any clean-up of its own."""
    if where == "step 5":
        original = run.AdapterTrainer.report_step

        def report(trainer: Any, logs: Any) -> None:
            original(trainer, logs)
            if trainer.state.global_step == 5:
                raise Killed

        monkeypatch.setattr(run.AdapterTrainer, "report_step", report)
    else:
        calls: list[Path] = []

        def synchronise(directory: Path) -> None:
            calls.append(directory)
            if len(calls) == 3:
                raise Killed

        monkeypatch.setattr(checkpoints, "_synchronise", synchronise)


@pytest.mark.parametrize("where", ["step 5", "third checkpoint"])
def test_an_interrupted_run_resumes_to_the_same_bits(
    model: Path, data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    out = tmp_path / "out"
    command = ["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS]
    with pytest.MonkeyPatch.context() as patch:
        interrupting(patch, where)
        with pytest.raises(Killed):
            main(command)
    assert not (out / "adapter_config.json").exists()
    assert main(command) == 0
    assert "\nresuming at step 4\n" in capsys.readouterr().err
    assert_same(out, finished)
    assert not list(out.rglob("*.part"))


@pytest.fixture(scope="module")
def finished_alone(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `finished`, by a process that has imported nothing else: other libraries may change the last bit."""
    out = tmp_path_factory.mktemp("finished") / "alone"
    with start(["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS]) as process:
        process.join()
    assert process.exitcode == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_killed_run_resumes_to_the_same_bits(
    model: Path, data: Path, finished_alone: Path, tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    command = ["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS]
    with start(command) as process:
        wait_until(lambda: (out / run.SETTINGS_FILE).exists() or not process.is_alive())
        time.sleep(random.uniform(0, SECONDS))
        process.kill()
    assert process.exitcode in (0, -signal.SIGKILL)
    with start(command) as process:
        process.join()
    assert process.exitcode == 0
    assert_same(out, finished_alone)


@contextlib.contextmanager
def start(command: list[str]) -> Iterator[Any]:
    """The command in a process of its own, forked from one that has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["twofold.training.finetune.run", "peft", "accelerate"])
    process = context.Process(target=main, args=(command,))
    process.start()
    try:
        yield process
    finally:
        process.join()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_a_full_disk_leaves_the_last_checkpoint_whole(
    model: Path, data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["finetune", str(model), "--data", str(data), "--out", str(out), *ARGUMENTS]
    original, calls = torch.save, []

    def full(value: Any, path: Any, *rest: Any, **more: Any) -> None:
        calls.append(path)
        if len(calls) > 6:
            raise RuntimeError("[enforce fail at inline_container.cc:672] No space left on device")
        original(value, path, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert main(command) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("twofold finetune:")]
    assert len(error) == 1
    assert "No space left on device" in error[0]
    assert "is whole" in error[0]
    assert not list(out.rglob("*.part"))
    assert main(command) == 0
    assert_same(out, finished)


BAD_SETTINGS: dict[str, tuple[list[str], str]] = {
    "unknown target": (["--targets", "attention,q_prj"], "'q_prj', which no module of this model is called"),
    "too long": (["--max-length", "100000"], "above the model's context"),
    "all held out": (["--eval-share", "0.9", "--data", "ONE"], "leaves none of 1 examples"),
    "no file": (["--data", "/nonexistent"], "--data /nonexistent: cannot be read"),
    "no targets": (["--targets", ","], "names no modules"),
    "rank": (["--rank", "0"], "a whole number from 1 to 512 is expected"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_take_one_line_and_write_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    given, message = BAD_SETTINGS[case]
    one = tmp_path / "one.jsonl"
    one.write_text('{"text": "the cat and the king"}\n')
    out = tmp_path / "out"
    arguments = [str(one) if each == "ONE" else each for each in given]
    assert code_of(["finetune", str(model), "--data", str(data), "--out", str(out), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not out.exists()


def test_too_little_memory_is_refused_before_anything_is_loaded(
    model: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "available_memory_bytes", lambda: 100 << 20)
    monkeypatch.setattr(run, "open_base", None)
    assert main(["finetune", str(model), "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("twofold finetune: training needs ")
    assert "0.10 GB are available" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


CHANGED: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "rank": (lambda data: ["--data", str(data), "--rank", "4"], "a run with --rank 3, and 4 was given"),
    "data": (lambda data: ["--data", str(data.parent / "other.jsonl")], "a run with --data"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_run_of_other_settings_is_not_resumed(
    model: Path, data: Path, finished: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    other = data.parent / "other.jsonl"
    other.write_text(data.read_text() * 2)
    given, message = CHANGED[case]
    before = (finished / "adapter_model.safetensors").read_bytes()
    assert main(["finetune", str(model), "--out", str(finished), *ARGUMENTS, *given(data)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert (finished / "adapter_model.safetensors").read_bytes() == before


def code_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
