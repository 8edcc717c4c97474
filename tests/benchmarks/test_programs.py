"""The runner: from flags over a model file and fake peers to what --json prints and the documents hold."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import SCENARIOS, main, parser_of
from benchmarks.scenario import PERFORMANCE, section_marks

# As `twofold bench --profile --json` prints it, among other things.
PROFILED = {"profile": {"decode": {"step_us": 900.0, "parts_us": {"sampler": 9.0}, "python_share": 0.02}}}
SPEED = {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 80.0}
TINY = ("--shape", "tiny", "--layers", "2", "--prompt-tokens", "64")


def test_one_run_with_fake_peers(fake_python, calls_of, tmp_path, capsys) -> None:
    cache = tmp_path / "cache"
    ours = fake_python("ours", [{"twofold": SPEED}])
    llama, fork = (fake_python(name, [{"prefill_s": 0.2, "decode_s": 0.8}]) for name in ("llama", "fork"))
    flags = ["peers", *TINY, "--rounds", "2", "--cache", str(cache), "--format", "q4_0", "--format", "q8_0"]
    flags += ["--twofold-python", ours, "--llama-python", llama, "--ik-python", fork]
    flags += ["--report", str(tmp_path / "r.json")]
    assert main([*flags, "--json"]) == 0
    out, err = capsys.readouterr()
    listed = json.loads(out)["rows"]
    assert {row["test"] for row in listed} == {"pp64", "tg32"}
    assert [row["ratio_to_twofold"] for row in listed if row["engine"] == "llama.cpp"] == [0.5, 0.5] * 2
    assert "q8_0 round 2/2 llama.cpp" in err
    # All engines were given the very same file, and it stays in the cache.
    model = cache / "tiny-2l-q4_0-s0-v2.gguf"
    assert model.is_file()
    tasks = {python: json.loads(calls_of(python)[0][1]) for python in (llama, fork)}
    assert calls_of(ours)[0][3] == tasks[llama]["model"] == tasks[fork]["model"] == str(model)
    assert (tasks[llama]["library"], "mmap" in tasks[llama]) == ("llama.cpp", True)
    assert (tasks[fork]["library"], "mmap" in tasks[fork]) == ("ik_llama.cpp", False)
    assert main(["peers", "--from-report", str(tmp_path / "r.json"), "--markdown"]) == 0
    cells = "80.0 (80.0–80.0) | 40.0 (40.0–40.0) | 40.0 (40.0–40.0) | 2.00× | 2.00×"
    assert f"| q8_0 | tg32 | {cells} |" in capsys.readouterr().out


def test_without_twofold_there_is_no_ratio(fake_python, tmp_path, capsys) -> None:
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    flags = [
        "peers",
        *TINY,
        "--rounds",
        "1",
        "--cache",
        str(tmp_path),
        "--delete",
        "--twofold-python",
        "no/python",
    ]
    assert main([*flags, "--llama-python", llama, "--ik-python", "no/python", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["ratio_to_twofold"] for row in report["rows"]] == [None, None]
    assert "no/python is not there" in report["left_out"]["q8_0"]["twofold"]
    assert not list(tmp_path.glob("*.gguf"))
    assert main([*flags, "--llama-python", "no/python", "--ik-python", "no/python"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_one_run_of_the_targets_with_players(tmp_path, fake_python, capsys) -> None:
    ours = fake_python("ours", [{"twofold": SPEED, **PROFILED, "load_s": 0.5}])
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    cache, report_path = tmp_path / "cache", tmp_path / "r.json"
    flags = ["targets", *TINY, "--cache", str(cache), "--format", "q8_0", "--rounds", "1", "--threads", "2"]
    flags += ["--twofold-python", ours, "--llama-python", llama]
    only = [word for name in ("llama", "busy", "python") for word in ("--only", name)]
    assert main([*flags, *only, "--report", str(report_path), "--json"]) == 1
    lines = json.loads(capsys.readouterr().out)["lines"]
    verdicts = {line["target"]: line["verdict"] for line in lines}
    assert verdicts["decode q8_0 ÷ llama.cpp ≥ 1.15 ×"] == "pass"
    # 640 against 320 tokens/s are twice, and four times is the target.
    assert verdicts["prefill q8_0 ÷ llama.cpp ≥ 4 ×"] == "short"
    assert verdicts["decode q8_0 beside one busy process per core ≥ 35 %"] == "pass"
    assert verdicts["Python outside native calls, decode q8_0 ≤ 3 %"] == "pass"
    assert list(cache.iterdir()) == []
    assert main(["targets", "--from-report", str(report_path)]) == 1
    assert "| short |" in capsys.readouterr().out
    assert main(["peers", "--from-report", str(report_path)]) == 2
    assert "holds no report of `python -m benchmarks peers`" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_explains_its_flags_and_its_table_has_a_place(name, capsys) -> None:
    scenario, text = SCENARIOS[name].load()
    assert f"python -m benchmarks {name}" in text
    assert "--report" in parser_of(name, scenario, text).format_help()
    if scenario.markdown is not None:
        page = PERFORMANCE.read_text(encoding="utf-8")
        assert all(page.count(mark) == 1 for mark in section_marks(name))
    assert main([]) == 0
    assert f"  {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["nonsense"], "no benchmark 'nonsense'"),
        (["peers"], "--cache DIR is needed"),
        (["peers", *TINY, "--layers", "3", "--cache", "x"], "--layers was given 3; tiny has 2"),
        (["peers", "--rounds", "0"], "0 was given; it takes 1 or more"),
        (["placement", "out"], "--trace FILE is needed"),
    ],
)
def test_wrong_arguments_are_refused(words, printed, capsys) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert code == 2
    assert printed in out + err
