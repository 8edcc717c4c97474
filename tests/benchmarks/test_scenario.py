"""What all scenarios share: quartiles, tables, the command that is named, and the sections of a document."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers import compare
from benchmarks.scenario import (
    command_line,
    markdown_table,
    median_cell,
    quartiles,
    section_marks,
    without_directories,
    write_section,
)


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert median_cell([1000.0, 1100.0, 1200.0]) == "1100.0 (1050.0–1150.0)"


def test_a_table_has_a_row_per_test_and_no_directories() -> None:
    rows = [
        {"engine": engine, "format": "q8_0", "test": test, "tokens_per_s": speeds[0], "samples": speeds}
        for engine, test, speeds in (
            ("twofold", "pp512", [1100.0]),
            ("llama.cpp", "pp512", [220.0, 210.0, 230.0]),
            ("twofold", "tg32", [60.0]),
        )
    ]
    left_out = {"q8_0": {"llama.cpp": "/home/me/bin/python: it is too old"}}
    table = compare.markdown({"rows": rows, "left_out": left_out})
    assert "| q8_0 | pp512 | 1100.0 (1100.0–1100.0) | 220.0 (215.0–225.0) | 5.00× |" in table
    assert "| q8_0 | tg32 | 60.0 (60.0–60.0) | - | - |" in table
    assert "Without llama.cpp in q8_0: …/python: it is too old." in table
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    assert without_directories("in /a/b/c.py, line 3") == "in …/c.py, line 3"


def test_a_section_of_a_document_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "d.md"
    begin, end = section_marks("peers")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    for body in ("new", "newer"):
        write_section(path, "peers", body)
        assert path.read_text(encoding="utf-8") == f"before\n{begin}\n{body}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="exactly one section"):
        write_section(path, "targets", "new")


def test_shapes_agree_with_those_of_the_lab() -> None:
    from twofold.tools.lab.shapes import SHAPES

    ours, theirs = FULL_SHAPES["qwen3-30b-a3b"], SHAPES["qwen3-30b-a3b"]
    assert (ours.hidden, ours.intermediate) == (theirs.hidden, theirs.intermediate)
    assert 2 * ours.attention_weights == theirs.dense_bytes_per_layer
    assert 2 * ours.vocab * ours.hidden == theirs.head_bytes


def test_the_command_holds_no_directories() -> None:
    words = ["peers", "--cache", "/mnt/big/cache", "--llama-python=/opt/x/bin/python", "--rounds", "5"]
    printed = "python -m benchmarks peers --cache …/cache --llama-python=…/python --rounds 5"
    assert command_line(words) == printed
