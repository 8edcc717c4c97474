"""The comparison with kt-kernel: which ways compete, and what is printed."""

from __future__ import annotations

import json
from types import ModuleType

import pytest


@pytest.fixture
def bench(load_script) -> ModuleType:
    return load_script("bench_kt_kernel")


def flags(ours: str, theirs: str) -> list[str]:
    ways = ["--format", "q4_0", "--format", "bf16", "--method", "raw-int4", "--method", "bf16-avx2"]
    return [
        "--shape",
        "tiny",
        "--turns",
        "2",
        "--passes",
        "3",
        "--twofold-python",
        ours,
        "--kt-python",
        theirs,
        *ways,
    ]


def test_our_fastest_against_theirs_by_size_of_the_weights(bench, fake_layer_python, capsys) -> None:
    # 512 tokens cost 512 / gain single ones.
    ours = fake_layer_python("ours", one_s=0.001, gain=32)
    theirs = fake_layer_python("theirs", one_s=0.002, gain=16)
    assert bench.main([*flags(ours, theirs), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {c["test"]: c for c in report["comparisons"]}
    assert found["decode, 4 bit"]["times_faster"] == pytest.approx(2)
    assert found["decode, BF16"]["kt_kernel"] == "bf16-avx2"
    assert found["prefill of 512"]["times_faster"] == pytest.approx(4)
    (row,) = [r for r in report["rows"] if (r["engine"], r["way"], r["tokens"]) == ("twofold", "q4_0", 512)]
    assert row["ms"] == pytest.approx(16)
    # 512 tokens, 2 experts of 3 x 256 x 256 weights, two operations each, in 16 ms.
    assert row["gflop_per_s"] == pytest.approx(512 * 2 * 3 * 256 * 256 * 2 / 0.016 / 1e9)
    assert row["passes"] == 2


def test_tables_name_who_is_missing(bench, fake_layer_python, fake_python, capsys) -> None:
    ours = fake_layer_python("ours")
    absent = fake_python("absent", [{"error": "kt-kernel cannot be imported: it is not installed"}], code=3)
    for how in ([], ["--markdown"]):
        assert bench.main([*flags(ours, absent), *how]) == 0
        told = capsys.readouterr().out
        assert "ithout kt-kernel raw-int4" in told
        assert "it is not installed" in told
    assert bench.main([*flags(absent, absent)]) == 2


def test_ways_that_compete_are_ways_that_exist(bench) -> None:
    from peers.kt_worker import METHODS
    from peers.random_blocks import FORMATS

    assert set(bench.THEIR_METHODS) <= set(METHODS)
    assert set(bench.OUR_FORMATS) <= set(FORMATS)
    for ours, theirs in bench.CLASSES.values():
        assert set(ours) <= set(FORMATS)
        assert set(theirs) <= set(METHODS)
