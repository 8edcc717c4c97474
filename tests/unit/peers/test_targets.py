"""The checks of the CPU's targets: arithmetic, verdicts, and one run of the program with players."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("gguf")

from peers.layers import Timing
from peers.shapes import FULL_SHAPES
from targets import engine_checks, file_checks, layer_checks
from targets.lines import Line, Settings, at_least, at_most, markdown, not_measured, table

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
        "kt_python": "no/python",
        "keep_models": False,
        "prompt_tokens": 64,
        "say": lambda text: None,
    }
    return Settings(**{**plain, **changes})


def test_a_target_is_met_at_its_limit_and_not_beyond() -> None:
    assert at_least("c", "x", 2, 2.0, "×").verdict == "pass"
    assert at_least("c", "x", 2, 1.99, "×").verdict == "short"
    assert at_most("c", "x", 3, 3.0, "%").verdict == "pass"
    assert at_most("c", "x", 3, 3.01, "%").verdict == "short"
    assert at_most("c", "x", 3, None, "%").verdict == "not measured"


def test_tables_count_verdicts_and_show_what_is_missing() -> None:
    lines = [
        at_least("c", "speed", 2, 2.5, "×", "a note"),
        at_most("c", "share", 3, 4, "%"),
        not_measured("c", "z", "why"),
    ]
    told = table(lines)
    assert told.endswith("1 pass, 1 short, 1 not measured")
    assert "| speed ≥ 2 × | 2.5 × | pass | a note |" in markdown([vars(line) for line in lines])
    assert "| z | - | not measured | why |" in markdown([vars(line) for line in lines])


def test_amortisation_is_time_over_experts_touched() -> None:
    timings = [
        Timing(1, [0.001], [8]),
        Timing(2, [0.003, 0.002, 0.0021], [16, 15, 14]),
        Timing(64, [0.032], [128]),
    ]
    # 15 experts on average would take 1.875 times one token; 2.1 were needed.
    assert layer_checks.amortisation(timings, 8) == {
        2: pytest.approx(2.1 / 1.875),
        64: pytest.approx(32 / 16),
    }


def test_small_batches_report_the_worst(tmp_path, fake_layer_python) -> None:
    # Any number of tokens touches 8 experts here: 64 tokens may cost four times one token (8 experts, top 2).
    good = fake_layer_python("good", gain=16)
    lines = layer_checks.small_batches(settings(tmp_path, python=good))
    assert [line.verdict for line in lines] == ["pass", "pass"]
    assert lines[0].figure == pytest.approx(64 / 16 / 4)
    lines = layer_checks.small_batches(settings(tmp_path, python=fake_layer_python("bad", gain=4)))
    assert [line.verdict for line in lines] == ["short", "short"]
    assert lines[0].figure == pytest.approx(64 / 4 / 4)


def test_shares_of_the_ceilings(tmp_path, fake_layer_python, monkeypatch) -> None:
    python = fake_layer_python("python", one_s=0.001, gain=32)
    monkeypatch.setattr(
        layer_checks.ceilings,
        "measure",
        lambda threads, python: {"read_gb_per_s": 2.1, "int8_gop_per_s": 20.0},
    )
    read, products = layer_checks.shares_of_the_ceilings(settings(tmp_path, python=python))
    # A token reads two experts of 1 MB in 1 ms.
    assert (read.figure, read.verdict) == (pytest.approx(100 * 2.0 / 2.1), "pass")
    # 8 experts of 32 tokens at top 2 are 128 tokens: 4 ms for 128 * 2 experts of 3 * 256 * 256 weights.
    assert products.figure == pytest.approx(100 * 128 * 2 * 2 * 3 * 256 * 256 / 0.004 / 1e9 / 20)


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
    python = fake_python("python", [PROFILED])
    (line,) = engine_checks.python_share(settings(tmp_path, python=python))
    assert (line.figure, line.verdict) == (pytest.approx(2), "pass")
    assert line.note == "of 0.90 ms; picking the token takes another 1.0 %"
    (line,) = engine_checks.python_share(settings(tmp_path, python=fake_python("old", [{"twofold": {}}])))
    assert line.verdict == "not measured"


def test_reading_reads_the_whole_file(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(100_000))
    file_checks.forget(path)
    assert file_checks.read_s(path) > 0
    file_checks.forget(path)
    assert path.stat().st_size == 100_000


def test_loading_is_compared_with_reading(tmp_path, fake_python) -> None:
    python = fake_python("python", [{"load_s": 1000.0}])
    (line,) = file_checks.load_time(settings(tmp_path, python=python))
    assert line.verdict == "short"
    assert "1000.00 s against" in line.note
    (line,) = file_checks.load_time(settings(tmp_path))
    assert line.verdict == "not measured"
    assert "no/python is not there" in line.note


@pytest.fixture
def program(load_script) -> ModuleType:
    load_script("bench_kt_kernel")
    return load_script("check_cpu_targets")


def test_one_run_with_players(program, tmp_path, fake_python, capsys) -> None:
    speed = {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 80.0}
    ours = fake_python("ours", [{"twofold": speed, **PROFILED, "load_s": 0.5}])
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    cache = tmp_path / "cache"
    flags = ["--shape", "tiny", "--layers", "2", "--cache", str(cache), "--format", "q8_0", "--rounds", "1"]
    flags += ["--prompt-tokens", "64", "--twofold-python", ours, "--llama-python", llama]
    only = [word for name in ("llama", "busy", "python", "kt") for word in ("--only", name)]
    report_path = tmp_path / "r.json"
    assert (
        program.main([*flags, *only, "--kt-python", "no/python", "--report", str(report_path), "--json"]) == 1
    )
    lines = [Line(**line) for line in json.loads(capsys.readouterr().out)["lines"]]
    verdicts = {line.target: line.verdict for line in lines}
    assert verdicts["decode q8_0 ÷ llama.cpp ≥ 1.15 ×"] == "pass"
    # 640 against 320 tokens/s are twice, and four times is the target.
    assert verdicts["prefill q8_0 ÷ llama.cpp ≥ 4 ×"] == "short"
    assert verdicts["decode q8_0 beside one busy process per core ≥ 35 %"] == "pass"
    assert verdicts["Python outside native calls, decode q8_0 ≤ 3 %"] == "pass"
    assert [line.verdict for line in lines if line.check == "kt"] == ["not measured"]
    assert list(cache.iterdir()) == []
    assert program.main(["--from-report", str(report_path)]) == 1
    assert "short" in capsys.readouterr().out


def test_models_that_were_there_before_stay(program, tmp_path, fake_python) -> None:
    cache = tmp_path / "cache"
    ours = fake_python("ours", [{"load_s": 0.0}])
    flags = ["--shape", "tiny", "--layers", "2", "--cache", str(cache), "--format", "q4_0", "--rounds", "1"]
    flags += ["--twofold-python", ours, "--only", "load"]
    assert program.main([*flags, "--keep"]) == 0
    assert program.main(flags) == 0
    assert [path.name for path in cache.iterdir()] == ["tiny-2l-q4_0-s0.gguf"]


def test_every_target_section_is_in_the_docs(program) -> None:
    import bench_kt_kernel
    from peers.report import BEGIN, END

    text = program.DOCS.read_text(encoding="utf-8")
    for module in (program, bench_kt_kernel):
        assert BEGIN.format(name=module.SECTION, maker=module.MAKER) in text
        assert END.format(name=module.SECTION) in text


def test_the_whole_model_is_not_tried_without_the_memory_for_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(file_checks.machine, "available_memory_bytes", lambda: 10 * 10**9)
    (line,) = file_checks.big_model(settings(tmp_path, shape=FULL_SHAPES["qwen3-30b-a3b"].with_layers(6)))
    assert line.verdict == "not measured"
    assert "48 layers" in line.target
    assert line.note.startswith("10 GB of memory are free, it takes 19")
    assert not (tmp_path / "cache").exists()


def test_the_whole_model_loads_and_decodes(tmp_path, fake_python) -> None:
    speed = {"prefill_tokens_per_s": 9.0, "decode_tokens_per_s": 7.0}
    python = fake_python("python", [{"load_s": 0.0, "twofold": speed}])
    load, decode = file_checks.big_model(settings(tmp_path, python=python))
    assert (load.verdict, decode.verdict, decode.figure) == ("pass", "pass", 7.0)
    assert list((tmp_path / "cache").iterdir()) == []
