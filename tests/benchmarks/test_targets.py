"""The checks of the CPU's targets: arithmetic, verdicts, and one run of the program with players."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.layer import Timing
from benchmarks.targets import engine_checks, file_checks, layer_checks
from benchmarks.targets.lines import Settings, at_least, at_most

# As `twofold bench --profile --json` prints it, among other things.
PROFILED = {"profile": {"decode": {"step_us": 900.0, "parts_us": {"sampler": 9.0}, "python_share": 0.02}}}


def settings(tmp_path: Path, **changes: object) -> Settings:
    plain = {
        "cache": tmp_path / "cache",
        "shape": FULL_SHAPES["tiny"],
        "formats": ("q8_0",),
        "threads": 2,
        "rounds": 2,
        "python": "no/python",
        "llama_python": "no/python",
        "keep_models": False,
        "prompt_tokens": 64,
    }
    return Settings(**{**plain, **changes})


def test_a_target_is_met_at_its_limit_and_not_beyond() -> None:
    assert at_least("c", "x", 2, "×").line(2.0).verdict == "pass"
    assert at_least("c", "x", 2, "×").line(1.99).verdict == "short"
    assert at_most("c", "x", 3, "%").line(3.0).verdict == "pass"
    assert at_most("c", "x", 3, "%").line(3.01).verdict == "short"
    assert at_most("c", "x", 3, "%").line(None).verdict == "not measured"


def test_busy_processes_compute_and_end(tmp_path) -> None:
    with engine_checks.busy_cores(2) as pids:
        assert len(pids) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ZeroDivisionError), engine_checks.busy_cores(1) as pids:
        raise ZeroDivisionError
    assert not Path(f"/proc/{pids[0]}").exists()


def test_beside_busy_processes_quiet_and_busy_take_turns(tmp_path, fake_python, calls_of) -> None:
    python = fake_python("python", [{"twofold": {"prefill_tokens_per_s": 9.0, "decode_tokens_per_s": 50.0}}])
    (line,) = engine_checks.beside_busy_processes(settings(tmp_path, python=python))
    assert (line.figure, line.verdict) == (100, "pass")
    assert len(calls_of(python)) == 4
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_share_of_python_is_read_from_the_profile(tmp_path, fake_python) -> None:
    runs = [
        {**PROFILED, "batch": batch, "decode_s": 1.0, "python_s": share}
        for batch in (1, 16, 64)
        for share in (0.5, 0.05, 0.01)
    ]
    line, *several = engine_checks.python_share(settings(tmp_path, python=fake_python("python", runs)))
    assert (line.figure, line.verdict) == (pytest.approx(2), "pass")
    assert line.note == "of 0.90 ms; picking the token takes another 1.0 %"
    assert [(line.figure, line.verdict) for line in several] == [
        (pytest.approx(5), verdict) for verdict in ("short", "pass", "pass", "pass")
    ], "16 sequences of a large model, then 1, 16 and 64 of the bundled one: medians of three runs"
    lines = engine_checks.python_share(settings(tmp_path, python=fake_python("old", [{"twofold": {}}])))
    assert [line.verdict for line in lines] == ["not measured"] * 5


def test_shares_are_of_the_higher_ceilings_around_a_turn(tmp_path, fake_python, monkeypatch) -> None:
    # The tiny shape in Q8_0: 8 experts of 3 x 256 x 256 weights in 34 bytes for 32. 128 tokens go to 2 experts each.
    read_s, products_s = 2 * 208_896 / 20e9, 2 * 128 * 2 * 3 * 256 * 256 / 100e9
    timed = [
        {"tokens": 1, "seconds": [2 * read_s] * 3, "touched": [2] * 3},
        {"tokens": 128, "seconds": [products_s / 0.75], "touched": [8]},
    ]
    rates = iter([(10.0, 100.0), (20.0, 50.0)] * 2)
    monkeypatch.setattr(layer_checks, "ceilings", lambda settings: kinds(*next(rates)))
    python = fake_python("python", timed)
    read, products = layer_checks.shares_of_the_ceilings(settings(tmp_path, python=python))
    assert (read.figure, read.verdict) == (pytest.approx(50), "short")
    assert read.note == "10 of 20 GB/s, a whole layer, median of 2 turns (50-50 %)"
    assert (products.figure, products.verdict) == (pytest.approx(75), "pass")
    assert products.note.startswith("75 of 100 Gop/s")
    monkeypatch.undo()
    lines = layer_checks.shares_of_the_ceilings(settings(tmp_path))
    assert [line.verdict for line in lines] == ["not measured"] * 2
    assert "kernels/bench/ceilings.py: no/python is not there" in lines[0].note


def kinds(read: float, products: float) -> dict[str, float]:
    names = (f"{kind}{tiles}_gop_per_s" for kind in ("f32", "bf16", "int8") for tiles in ("", "_tiles"))
    return {"read_gb_per_s": read, **dict.fromkeys(names, products)}


def test_small_batches_are_compared_by_the_experts_that_they_touch(tmp_path, fake_python) -> None:
    def turn(one_s: float, two_s: float) -> list[Timing]:
        return [Timing(1, [one_s] * 3, [8] * 3), Timing(2, [two_s, two_s, 9.0], [12, 12, 12])]

    # Two tokens touch 1.5 times as many experts. A turn's own time of one token counts.
    assert layer_checks.amortisation([turn(1.0, 1.8), turn(2.0, 3.3), turn(1.0, 1.5)], 8) == {
        2: pytest.approx(1.1)
    }
    timed = [
        {"tokens": tokens, "seconds": [0.1 * tokens], "touched": [2 * min(tokens, 3)]}
        for tokens in (1, 2, 4, 8, 16, 32, 64)
    ]
    one, two = layer_checks.small_batches(settings(tmp_path, python=fake_python("python", timed)))
    assert "1 thread, q8_0" in one.target
    assert "2 threads, q8_0" in two.target
    assert (one.figure, one.verdict) == (pytest.approx(64 / 3), "short")
    assert one.note.startswith("tokens: factor 2: 1.00, 4: 1.33")


def test_loading_is_compared_with_reading(tmp_path, fake_python) -> None:
    python = fake_python("python", [{"load_s": 1000.0}])
    (line,) = file_checks.load_time(settings(tmp_path, python=python))
    assert line.verdict == "short"
    assert "1000.00 s against" in line.note
    (line,) = file_checks.load_time(settings(tmp_path))
    assert line.verdict == "not measured"
    assert "no/python is not there" in line.note


def test_the_whole_model_loads_and_decodes(tmp_path, fake_python) -> None:
    speed = {"prefill_tokens_per_s": 9.0, "decode_tokens_per_s": 7.0}
    python = fake_python("python", [{"load_s": 0.0, "twofold": speed}])
    load, decode = file_checks.big_model(settings(tmp_path, python=python))
    assert (load.verdict, decode.verdict, decode.figure) == ("pass", "pass", 7.0)
    assert list((tmp_path / "cache").iterdir()) == []
