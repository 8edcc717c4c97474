"""`twofold lab prefetch`: the same answers with and without, faster or not; what differs is an error."""

from __future__ import annotations

import json

import pytest
from twofold.api.errors import KernelError
from twofold.tools.cli.main import main
from twofold.tools.lab import prefetch

from tests.tiny_models.writing import TinyModel, write_tiny_model

MACHINE = "rtx4090-pcie4"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(num_layers=3, num_experts=16)))


def test_rows_hold_what_was_counted(model, capsys, monkeypatch):
    monkeypatch.setattr(prefetch, "synthetic_rows", lambda *given: [{"routing": "synthetic", "given": given}])
    arguments = ["--model", model, "--profile", MACHINE, "--slots", "0.25", "--new-tokens", "6", "--json"]
    assert main(["lab", "prefetch", *arguments]) == 0
    row, other = json.loads(capsys.readouterr().out)
    assert other == {"routing": "synthetic", "given": [[MACHINE], [0.25]]}
    assert (row["profile"], row["slots"], row["clock"]) == (MACHINE, 0.25, "virtual")
    assert row["off_tokens_per_s"] > 0
    assert row["on_tokens_per_s"] > 0
    assert 0 < row["off_hit_rate"] < 1
    assert row["used"] + row["wasted"] <= row["issued"] > 0
    assert 0 < row["precision"] <= 1


def test_tables_show_both_parts(model, capsys, monkeypatch):
    monkeypatch.setattr(
        prefetch, "play_sticky", lambda *given, prefetch, num_steps: (20.0 + prefetch, COUNTS)
    )
    arguments = ["--model", model, "--profile", MACHINE, "--slots", "0.25", "--new-tokens", "2"]
    assert main(["lab", "prefetch", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == [MACHINE, "25%", "20.00", "21.00", "+5.0%", "3", "1"]
    assert lines[3].split()[:2] == [MACHINE, "25%"]


COUNTS = {"issued": 3, "used": 1}


def test_another_answer_is_an_error(model, monkeypatch):
    right = prefetch.answer

    def wrong(config, new_tokens):
        answers = right(config, new_tokens)
        if config.prefetch == "on":
            answers.tokens[0][-1] ^= 1
        return answers

    monkeypatch.setattr(prefetch, "answer", wrong)
    with pytest.raises(KernelError, match="answered differently from accelerator none"):
        list(prefetch.engine_rows(model, [MACHINE], [0.25], 3))


@pytest.mark.parametrize("wrong", [["--new-tokens", "1"], ["--profile", "abacus"]])
def test_what_cannot_be_is_refused(model, wrong, capsys):
    assert main(["lab", "prefetch", "--model", model, *wrong]) == 2
    assert wrong[-1] in capsys.readouterr().err
