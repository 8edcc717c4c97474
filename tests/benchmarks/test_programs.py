"""The programs: from flags over a model file and fake peers to what --json prints and the documents hold."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import batching
from benchmarks.peers import __main__ as peers
from benchmarks.peers import kt_kernel, long_context
from benchmarks.peers.report import BEGIN, DOCS, END, NOTEBOOK
from benchmarks.targets import __main__ as targets
from benchmarks.targets.lines import Line

# As `twofold bench --profile --json` prints it, among other things.
PROFILED = {"profile": {"decode": {"step_us": 900.0, "parts_us": {"sampler": 9.0}, "python_share": 0.02}}}
TINY = ("--shape", "tiny", "--layers", "2", "--no-ceilings", "--rounds", "2", "--prompt-tokens", "64")


def test_one_run_with_fake_peers(fake_python, calls_of, tmp_path, capsys) -> None:
    cache = tmp_path / "cache"
    speed = {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 80.0}
    ours = fake_python("ours", [{"twofold": speed}])
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    flags = [*TINY, "--cache", str(cache), "--twofold-python", ours, "--llama-python", llama]
    flags += ["--format", "q4_0", "--format", "q8_0"]
    assert peers.main([*flags, "--json", "--report", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    listed = json.loads(out)
    assert [set(row) for row in listed] == [
        {"engine", "format", "test", "tokens_per_s", "ratio_to_twofold"}
    ] * 8
    assert {row["test"] for row in listed} == {"pp64", "tg32"}
    assert [row["ratio_to_twofold"] for row in listed if row["engine"] == "llama.cpp"] == [0.5, 0.5] * 2
    assert "q8_0 round 2/2 llama.cpp" in err
    # Both engines were given the very same file, and it stays in the cache.
    model = cache / "tiny-2l-q4_0-s0-v2.gguf"
    assert model.is_file()
    assert calls_of(ours)[0][3] == json.loads(calls_of(llama)[0][1])["model"] == str(model)
    left_out = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["left_out"]
    assert left_out["q4_0"] == {"transformers": "it is compared on bf16 only"}
    assert peers.main(["--from-report", str(tmp_path / "r.json"), "--markdown"]) == 0
    assert "| q8_0 | tg32 | 80.0 (80.0–80.0) | 40.0 (40.0–40.0) | 2.00× | - |" in capsys.readouterr().out


def kt_flags(ours: str, theirs: str) -> list[str]:
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


def test_our_fastest_against_theirs_by_size_of_the_weights(fake_layer_python, capsys) -> None:
    # 512 tokens cost 512 / gain single ones.
    ours = fake_layer_python("ours", one_s=0.001, gain=32)
    theirs = fake_layer_python("theirs", one_s=0.002, gain=16)
    assert kt_kernel.main([*kt_flags(ours, theirs), "--json"]) == 0
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


def test_one_run_of_the_targets_with_players(tmp_path, fake_python, capsys) -> None:
    speed = {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 80.0}
    ours = fake_python("ours", [{"twofold": speed, **PROFILED, "load_s": 0.5}])
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    cache = tmp_path / "cache"
    flags = ["--shape", "tiny", "--layers", "2", "--cache", str(cache), "--format", "q8_0", "--rounds", "1"]
    flags += ["--prompt-tokens", "64", "--twofold-python", ours, "--llama-python", llama]
    only = [word for name in ("llama", "busy", "python", "kt") for word in ("--only", name)]
    report_path = tmp_path / "r.json"
    assert (
        targets.main([*flags, *only, "--kt-python", "no/python", "--report", str(report_path), "--json"]) == 1
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
    assert targets.main(["--from-report", str(report_path)]) == 1
    assert "short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "page"),
    [(peers, DOCS), (kt_kernel, DOCS), (targets, DOCS), (batching, NOTEBOOK), (long_context, NOTEBOOK)],
)
def test_the_section_that_a_program_writes_is_in_the_documents(program, page) -> None:
    text = page.read_text(encoding="utf-8")
    assert BEGIN.format(name=program.SECTION, maker=program.MAKER) in text
    assert END.format(name=program.SECTION) in text


def test_long_contexts_are_filled_once_and_measured_in_turn(tmp_path, capsys) -> None:
    def fake(name: str, seconds: float) -> str:
        path = tmp_path / name
        path.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"notes = open({str(path) + '.calls'!r}, 'a')\n"
            "notes.write(sys.argv[2] + '\\n')\nprint(json.dumps({'ready': 'x'}), flush=True)\n"
            "for line in sys.stdin:\n"
            "    print(line, file=notes, end='', flush=True)\n"
            f"    print(json.dumps({{'seconds': {seconds}}}), flush=True)\n"
        )
        path.chmod(0o755)
        return str(path)

    flags = [
        "--shape",
        "tiny",
        "--layers",
        "2",
        "--cache",
        str(tmp_path),
        "--rounds",
        "2",
        "--new-tokens",
        "4",
    ]
    flags += [
        "--positions",
        "1024",
        "--positions",
        "512",
        "--prompt-tokens",
        "8",
        "--kv",
        "q8",
        "--kv",
        "fp8",
    ]
    ours, theirs = fake("ours", 0.5), fake("theirs", 1.0)
    assert long_context.main([*flags, "--twofold-python", ours, "--llama-python", theirs]) == 0
    out = capsys.readouterr().out
    assert "| q8 : q8_0 | 1,024 | decode | 8.0 (8.0–8.0) | 4.0 (4.0–4.0) | 2.00× |" in out
    assert "| fp8 | 512 | prefill | 16.0 (16.0–16.0) | - | - |" in out
    task, *orders = [json.loads(line) for line in (tmp_path / "theirs.calls").read_text().splitlines()]
    assert (task["kv"], task["model"]) == ("q8_0", str(next(tmp_path.glob("*.gguf"))))
    turns = [{"decode": 4}, {"prefill": 8}] * 3
    assert orders == [{"fill": 512}, *turns, {"fill": 1024}, *turns]
    with pytest.raises(SystemExit):
        long_context.parse([*flags, "--positions", "700"])
