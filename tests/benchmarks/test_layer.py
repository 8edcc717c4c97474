"""One MoE layer of several engines: its routing, what workers print, and the table with its comparisons."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import pytest

from benchmarks.__main__ import main
from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.engines import OURS
from benchmarks.peers.layer import Layer
from benchmarks.peers.workers.layer_worker import routing
from benchmarks.scenario import BenchmarkError


def test_a_token_gets_different_experts_and_balanced_ones_the_same_number_of_tokens() -> None:
    draw = random.Random(1)
    ids, evenly = (routing(draw, 512, 128, 8, is_balanced=is_balanced) for is_balanced in (False, True))
    assert all(len(set(row)) == 8 for row in [*ids, *evenly])
    loads = Counter(expert for row in ids for expert in row)
    assert len(loads) == 128 > len(set(loads.values())) > 1
    assert set(Counter(expert for row in evenly for expert in row).values()) == {32}


@pytest.mark.parametrize("weights", ["q4_0", "int4_channel", "bf16"])
def test_our_worker_times_every_pass_after_the_first(weights: str) -> None:
    tiny = FULL_SHAPES["tiny"]
    layer = Layer(OURS, weights, sys.executable, tiny, threads=1)
    one, many = layer.measure([(1, 3, False), (32, 1, True)])
    assert (one.touched, many.touched) == ([tiny.top_k] * 3, [tiny.experts])
    assert all(took > 0 for took in [*one.seconds, *many.seconds])
    assert len(one.seconds) == 3


def test_both_sides_take_turns_and_the_fastest_of_each_are_compared(
    fake_python, calls_of, tmp_path, capsys
) -> None:
    ours = fake_python("ours", timings(0.001, 0.1))
    theirs = fake_python("theirs", ["Hello", *timings(0.003, 0.4)])
    flags = ["layer", "--format", "q4_0", "--method", "raw-int4", "--method", "bf16-avx2", "--rounds", "2"]
    flags += ["--twofold-python", ours, "--kt-python", theirs, "--report", str(tmp_path / "r.json")]
    assert main([*flags, "--passes", "2"]) == 0
    table = capsys.readouterr().out
    # 2 operations x 512 tokens x 8 experts x 3 matrices of 2048 x 768 are 38.7 GFLOP.
    assert "| twofold | q4_0 | 1.00 (1.00–1.00) | 100.00 (100.00–100.00) | 387 |" in table
    assert "- decode, 4 bit: q4_0 is 3.00× as fast as kt-kernel's best (raw-int4)." in table
    assert "- prefill of 512: q4_0 is 4.00× as fast as kt-kernel's best (bf16-avx2)." in table
    assert "BF16:" not in table
    assert "one scale" not in table
    tasks = [json.loads(call[1]) for call in calls_of(theirs)]
    assert [(task["engine"], task["weights"]) for task in tasks] == [
        ("kt-kernel", method) for method in ("raw-int4", "bf16-avx2") * 2
    ]
    assert tasks[0]["cases"] == [[1, 2, False], [512, 1, False]]
    assert main(["layer", "--from-report", str(tmp_path / "r.json"), "--markdown"]) == 0
    assert table.strip() in capsys.readouterr().out


def test_a_method_that_the_cpu_lacks_is_named_with_its_reason(fake_python, capsys) -> None:
    ours = fake_python("ours", timings(0.001, 0.1))
    theirs = fake_python("theirs", [], code=1, stderr="RuntimeError: it requires avx_vnni\n")
    flags = [
        "layer",
        "--format",
        "q4_0",
        "--method",
        "raw-int4-avxvnni",
        "--rounds",
        "1",
        "--kt-python",
        theirs,
    ]
    assert main([*flags, "--twofold-python", ours]) == 0
    out = capsys.readouterr().out
    assert "- Without kt-kernel raw-int4-avxvnni: " in out
    assert "it requires avx_vnni." in out
    assert main([*flags, "--twofold-python", "no/python"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_a_worker_that_prints_too_little_is_an_error(fake_python) -> None:
    layer = Layer(OURS, "q4_0", fake_python("ours", timings(0.001)), FULL_SHAPES["tiny"], threads=1)
    with pytest.raises(BenchmarkError, match="printed no measurement"):
        layer.measure([(1, 2, False), (512, 1, False)])


def timings(*seconds: float) -> list[dict[str, object]]:
    return [{"tokens": 0, "seconds": [each, each], "touched": [8, 8]} for each in seconds]
