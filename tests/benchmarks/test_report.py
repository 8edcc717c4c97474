"""Turns, medians, quartiles, ratios and bounds; what is printed of them and written into the docs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.peers import machine, report
from benchmarks.peers.ceilings import bounds
from benchmarks.peers.engines import PeerError, Round, Workload
from benchmarks.peers.rounds import Series, alternate, quartiles, rows
from benchmarks.peers.shapes import FULL_SHAPES

WORK = Workload(prompt_tokens=512, new_tokens=32)


@dataclass
class Scripted:
    """An engine that gives prepared rounds and notes whose turn it was; a text is an error."""

    name: str
    rounds: list[Round | str]
    log: list[str] = field(default_factory=list)

    def measure(self, model: Path, work: Workload) -> Round:
        self.log.append(self.name)
        told = self.rounds.pop(0)
        if isinstance(told, str):
            raise PeerError(told)
        return told


def test_engines_take_turns_and_every_round_counts() -> None:
    log: list[str] = []
    ours = Scripted("twofold", [Round(1000, 60), Round(1200, 40), Round(1100, 50)], log)
    theirs = Scripted("llama.cpp", [Round(500, 30), Round(300, 40), Round(220, 25)], log)
    outcome = alternate([ours, theirs], Path("m"), WORK, "q8_0", 3)
    assert log == ["twofold", "llama.cpp"] * 3
    assert rows(outcome.series) == [
        {
            "engine": "twofold",
            "format": "q8_0",
            "test": "pp512",
            "tokens_per_s": 1100,
            "ratio_to_twofold": 1.0,
        },
        {"engine": "twofold", "format": "q8_0", "test": "tg32", "tokens_per_s": 50, "ratio_to_twofold": 1.0},
        {
            "engine": "llama.cpp",
            "format": "q8_0",
            "test": "pp512",
            "tokens_per_s": 300,
            "ratio_to_twofold": 300 / 1100,
        },
        {
            "engine": "llama.cpp",
            "format": "q8_0",
            "test": "tg32",
            "tokens_per_s": 30,
            "ratio_to_twofold": 0.6,
        },
    ]
    assert outcome.series[2].ratios == [0.5, 0.25, 0.2]


def test_an_engine_that_fails_is_left_out_and_named() -> None:
    ours = Scripted("twofold", [Round(1000, 60), Round(1200, 40)])
    theirs = Scripted("llama.cpp", [Round(500, 30), "out of memory"])
    gone = Scripted("transformers", ["not installed"])
    outcome = alternate([ours, theirs, gone], Path("m"), WORK, "bf16", 2)
    assert outcome.left_out == {"llama.cpp": "out of memory", "transformers": "not installed"}
    assert [(s.engine, s.test, s.samples) for s in outcome.series if s.engine != "twofold"] == [
        ("llama.cpp", "pp512", [500]),
        ("llama.cpp", "tg32", [30]),
    ]


def test_without_twofold_there_is_no_ratio() -> None:
    (row,) = rows([Series("llama.cpp", "q8_0", "pp512", [100.0], [])])
    assert row["ratio_to_twofold"] is None


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def some_report(**changes: object) -> dict:
    series = [
        Series("twofold", "q8_0", "pp512", [1000.0, 1100.0, 1200.0], [1.0, 1.0, 1.0]),
        Series("llama.cpp", "q8_0", "pp512", [200.0, 220.0, 250.0], [0.2, 0.2, 0.2]),
        Series("twofold", "q8_0", "tg32", [60.0], [1.0]),
        Series("llama.cpp", "q8_0", "tg32", [50.0], [0.8]),
    ]
    run = {
        "date": "2026-01-02",
        "command": "python -m benchmarks.peers",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gib": 23.6},
        "shape": "qwen3-30b-a3b",
        "layers": 6,
        "ceilings": {"read_gb_per_s": 48.0, "int8_gop_per_s": 2100.0},
        **changes,
    }
    left_out = {"q8_0": {"transformers": "/home/me/bin/python: it is compared on bf16 only"}}
    return report.as_report(series, left_out, {}, run)


def test_bounds_are_bytes_and_operations_over_what_the_machine_can() -> None:
    found = bounds(some_report(), "q8_0")
    # The issue's own arithmetic for this shape: 69 tokens/s at 48 GB/s, about 3,000 at 2.1 TOP/s.
    assert found["tg"] == pytest.approx(69, abs=1)
    assert found["pp"] == pytest.approx(3000, rel=0.05)
    assert bounds(some_report(ceilings={}), "q8_0") == {}
    assert "pp" not in bounds(some_report(), "bf16")


def test_markdown_has_a_row_per_test_and_no_directories() -> None:
    told = report.markdown(some_report())
    assert "| q8_0 | pp512 | 1100.0 (1050.0–1150.0) | 220.0 (210.0–235.0) | 5.00× | " in told
    assert "| q8_0 | tg32 | 60.0 (60.0–60.0) | 50.0 (50.0–50.0) | 1.20× | 69 |" in told
    assert "/home" not in told
    assert "…/python: it is compared on bf16 only" in told


def test_a_section_of_a_document_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    begin, end = report.BEGIN.format(name="peers", maker="x.py"), report.END.format(name="peers")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    for body in ("new", "newer"):
        report.write_section(path, "peers", "x.py", body)
        assert path.read_text(encoding="utf-8") == f"before\n{begin}\n{body}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="exactly one section"):
        report.write_section(path, "targets", "x.py", "new")


def test_shapes_agree_with_those_of_the_lab() -> None:
    from twofold.tools.lab.shapes import SHAPES

    ours, theirs = FULL_SHAPES["qwen3-30b-a3b"], SHAPES["qwen3-30b-a3b"]
    assert (ours.hidden, ours.intermediate) == (theirs.hidden, theirs.intermediate)
    assert 2 * ours.attention_weights == theirs.dense_bytes_per_layer
    assert 2 * ours.vocab * ours.hidden == theirs.head_bytes


def test_the_command_holds_no_directories(monkeypatch) -> None:
    words = ["x", "--cache", "/mnt/big/cache", "--llama-python=/opt/x/bin/python", "--rounds", "5"]
    monkeypatch.setattr(sys, "argv", words)
    said = "python -m benchmarks.peers --cache …/cache --llama-python=…/python --rounds 5"
    assert machine.command_line("benchmarks.peers") == said
