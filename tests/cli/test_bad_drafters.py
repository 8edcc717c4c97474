"""A drafter that cannot be: one line that names what was given and the remedy, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twofold.text.tokenizer import Tokenizer
from twofold.text.tokenizer.comparison import first_difference
from twofold.tools.cli.main import main

from tests.tiny_models.eagle3 import TinyEagle3
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model


def other_tokenizer(directory: Path, **changes: object) -> Path:
    """The model with two tokens' texts swapped, or other changes of tokenizer.json."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content | changes))
    return directory


def run(capsys: pytest.CaptureFixture[str], model: Path, config: object, *also: str) -> str:
    given = config if isinstance(config, str) else json.dumps(config)
    words = ["generate", str(model), "--prompt", "the", "--max-tokens", "2", "--accelerator", "none"]
    assert main([*words, "--speculative-config", given, *also]) == 2
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 1, reported
    return reported[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{", "it takes a JSON object"),
        ({"method": "medusa"}, "'medusa'; it takes ngram, suffix, mtp"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "17; it takes a whole number from 1 to 16"),
        ({"method": "ngram", "depth": 3}, "'depth' is no key"),
        ({"method": "ngram", "model": "/x"}, "method ngram has none"),
        ({"method": "draft_model"}, "method draft_model takes the path of its model"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "a number from 0.0 to 1.0"),
        ({"method": "draft_model", "model": "/nowhere"}, "'/nowhere', which does not exist"),
        ({"model": "/nowhere"}, "'/nowhere', which does not exist"),
    ],
)  # fmt: skip
def test_a_drafter_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, expected: str
) -> None:
    assert expected in run(capsys, write_tiny_model(tmp_path / "model", TinyModel()), config)


@pytest.mark.parametrize(
    ("method", "also"), [("ngram", "--num-deferred-experts=2"), ("suffix", "--cache-prior=0.3")]
)
def test_settings_that_change_outputs_are_refused_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, also: str
) -> None:
    reported = run(capsys, write_tiny_model(tmp_path / "model", TinyModel()), {"method": method}, also)
    assert f"--speculative-config and {also.split('=')[0]} were both given" in reported


def test_a_model_without_the_layer_or_a_head_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "model", TinyModel(num_layers=4))
    head = TinyEagle3(target_hidden_size=64, target_layers=(0, 1, 2)).write(tmp_path / "head")
    assert "has no MTP layer" in run(capsys, target, {"method": "mtp"})
    assert "target_hidden_size is 64" in run(capsys, target, {"method": "eagle3", "model": str(head)})


def test_a_draft_model_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_tiny_model(tmp_path / "model", TinyModel())
    other = other_tokenizer(write_tiny_model(tmp_path / "other", EXAMPLES["qwen3"]))
    recurrent = write_tiny_model(tmp_path / "recurrent", EXAMPLES["qwen3_next"])
    empty = tmp_path / "empty"
    empty.mkdir()
    for model, expected in (
        (other, "whose tokenizer is another one than the model's: token 67 is 'b', not 'a'"),
        (recurrent, "keeps a recurrent state"),
        (empty, "config.json"),
    ):
        assert expected in run(capsys, target, {"method": "draft_model", "model": str(model)})


def test_the_doctor_counts_the_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_tiny_model(tmp_path / "model", TinyModel())
    draft = write_tiny_model(tmp_path / "draft", EXAMPLES["qwen3"])
    config = json.dumps({"method": "draft_model", "model": str(draft)})
    for expected in ("ok", "bad"):
        main(["doctor", str(target), "--accelerator", "none", "--speculative-config", config])
        found = next(line for line in capsys.readouterr().out.splitlines() if " drafter " in line)
        assert found.split()[0].strip("[]").lower() == expected, found
        other_tokenizer(draft)


def test_tokenizers_are_compared_by_text_and_role(tmp_path: Path) -> None:
    one = Tokenizer.load(write_tiny_model(tmp_path / "one", TinyModel()))
    path = write_tiny_model(tmp_path / "two", TinyModel())
    assert first_difference(one, Tokenizer.load(path)) is None
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"][-1]["special"] = not content["added_tokens"][-1]["special"]
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert "is text, not a control token" in (first_difference(one, Tokenizer.load(path)) or "")
