"""The program: from flags over a model file and fake peers to the list that --json prints."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

pytest.importorskip("gguf")


@pytest.fixture
def bench_peers(load_script) -> ModuleType:
    return load_script("bench_peers")


TINY = ("--shape", "tiny", "--layers", "2", "--no-ceilings", "--rounds", "2", "--prompt-tokens", "64")


def test_one_run_with_fake_peers(bench_peers, fake_python, calls_of, tmp_path, capsys) -> None:
    cache = tmp_path / "cache"
    speed = {"prefill_tokens_per_s": 640.0, "decode_tokens_per_s": 80.0}
    ours = fake_python("ours", [{"twofold": speed}])
    llama = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    flags = [*TINY, "--cache", str(cache), "--twofold-python", ours, "--llama-python", llama]
    flags += ["--format", "q4_0", "--format", "q8_0"]
    assert bench_peers.main([*flags, "--json", "--report", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    listed = json.loads(out)
    assert [set(row) for row in listed] == [
        {"engine", "format", "test", "tokens_per_s", "ratio_to_twofold"}
    ] * 8
    assert {row["test"] for row in listed} == {"pp64", "tg32"}
    assert [row["ratio_to_twofold"] for row in listed if row["engine"] == "llama.cpp"] == [0.5, 0.5] * 2
    assert "q8_0 round 2/2 llama.cpp" in err
    # Both engines were given the very same file, and it stays in the cache.
    model = cache / "tiny-2l-q4_0-s0.gguf"
    assert model.is_file()
    assert calls_of(ours)[0][3] == json.loads(calls_of(llama)[0][1])["model"] == str(model)
    left_out = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["left_out"]
    assert left_out["q4_0"] == {"transformers": "it is compared on bf16 only"}
    assert bench_peers.main(["--from-report", str(tmp_path / "r.json"), "--markdown"]) == 0
    assert "| q8_0 | tg32 | 80.0 (80.0–80.0) | 40.0 (40.0–40.0) | 2.00× | - |" in capsys.readouterr().out


def test_delete_removes_what_this_run_made_and_nothing_else(bench_peers, fake_python, tmp_path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "mine.txt").write_text("stays", encoding="utf-8")
    python = fake_python("llama", [{"prefill_s": 0.2, "decode_s": 0.8}])
    flags = [*TINY, "--cache", str(cache), "--engine", "llama.cpp", "--llama-python", python]
    assert bench_peers.main([*flags, "--delete"]) == 0
    assert [path.name for path in cache.iterdir()] == ["mine.txt"]
    assert bench_peers.main(flags) == 0
    assert bench_peers.main([*flags, "--delete"]) == 0
    assert (cache / "tiny-2l-q8_0-s0.gguf").exists()


def test_nothing_to_measure_is_an_error_that_says_why(bench_peers, fake_python, tmp_path, capsys) -> None:
    python = fake_python("llama", [{"error": "no llama_cpp"}], code=3)
    flags = [*TINY, "--cache", str(tmp_path), "--engine", "llama.cpp", "--llama-python", python]
    assert bench_peers.main(flags) == 2
    assert "no llama_cpp; install it: pip install 'twofold[peers]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--rounds", "0", "--cache", "c"], "--rounds was given 0"),
        (["--layers", "49", "--cache", "c"], "qwen3-30b-a3b has 48"),
        ([], "--cache DIR is needed"),
        (["--format", "q3_k", "--cache", "c"], "invalid choice"),
    ],
)
def test_wrong_flags_are_refused(bench_peers, capsys, flags, why) -> None:
    with pytest.raises(SystemExit):
        bench_peers.main(flags)
    assert why in capsys.readouterr().err


def test_the_section_that_it_writes_is_in_the_docs(bench_peers) -> None:
    from peers.report import BEGIN, END

    text = bench_peers.DOCS.read_text(encoding="utf-8")
    assert BEGIN.format(name=bench_peers.SECTION, maker=bench_peers.MAKER) in text
    assert END.format(name=bench_peers.SECTION) in text
