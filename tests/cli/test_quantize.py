"""`twofold quantize` on the command line: what it prints, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twofold.models.bundled import bundled_model_path
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, write_tiny_model

TINY = TinyModel(
    hidden_size=256, head_dim=64, moe_intermediate_size=256, num_layers=2, num_experts=4, dtype="bfloat16"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), TINY)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["quantize", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat and the king " * 20)
    arguments = (source, tmp_path / "out", "--format", "q8_0", "--text", text, "--cpu-threads", 2)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "KL divergence" in out
    assert "perplexity" in out
    assert out.strip().splitlines()[-1].strip().split(":")[0] in (
        "as good as the source",
        "good",
        "noticeable",
    )
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0
    assert "is complete already" in err
    report = json.loads(out)
    assert report["format"] == "q8_0"
    assert report["bytes"] < report["source_bytes"]
    assert report["tensors_by_format"]["q8_0"] == 16
    assert 0 <= report["quality"]["kl_mean"] < 0.05
    assert (
        main(
            [
                "generate",
                str(tmp_path / "out"),
                "--prompt",
                "the",
                "--max-tokens",
                "3",
                "--accelerator",
                "none",
            ]
        )
        == 0
    )
    code, out, _ = run(capsys, source, tmp_path / "fast", "--format", "q4_0", "--max-tokens", 0)
    assert code == 0
    assert "not compared" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "q3_k"], "--format was given 'q3_k'; it takes q8_0, q4_0, q4_k"),
        (["--format", "q8_0", "--max-tokens", "many"], "--max-tokens: 'many' was given; a whole number"),
        (["--format", "q8_0", "--cpu-threads", "-1"], "--cpu-threads: '-1' was given"),
        (["--format", "q8_0", "--text", "/absent/text"], "--text /absent/text: cannot be read"),
        (["--format", "q8_0", "--text", "BINARY"], "not UTF-8 text at byte 0"),
        (["--format", "q8_0", "--text", "EMPTY"], "--text has fewer than two tokens"),
        ([], "either --format or --rules is needed"),
    ],
)
def test_wrong_arguments_give_one_line_and_code_2(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    (tmp_path / "EMPTY").write_text("")
    given = [str(tmp_path / item) if item in ("BINARY", "EMPTY") else item for item in arguments]
    try:
        code, _, err = run(capsys, source, tmp_path / "out", *given)
    except SystemExit as left:
        code, err = int(left.code or 0), capsys.readouterr().err
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path / "absent", tmp_path / "out", "--format", "q8_0")
    assert code == 2
    assert "no such model directory" in err


def test_a_layer_that_only_drafts_is_written_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys, bundled_model_path(), tmp_path / "out", "--format", "q8_0", "--max-tokens", 16
    )
    assert (code, err) == (0, "")
    assert "not compared" in out.splitlines()[-2]
