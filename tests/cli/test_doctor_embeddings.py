"""`twofold doctor` says how a model pools and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twofold.tools.cli.main import main

from tests.tiny_models.writing import write_tiny_model


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    main(["doctor", *words, "--accelerator", "none", "--port", "0", "--json"])
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    return checks["embeddings"]["verdict"], checks["embeddings"]["found"]


def test_doctor_reports_embeddings_and_reranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "m")
    for flags, found in (
        ((), "48 elements, last pooling (the default), normalised; reranking by cosine of embeddings"),
        (
            (
                "--pooler-config",
                '{"pooling_type": "MEAN", "normalize": false, "classifier_from_token": ["a", "b"]}',
            ),
            "48 elements, mean pooling (--pooler-config), not normalised; reranking by logits of 'b' and 'a'",
        ),
    ):
        assert check(capsys, str(model), *flags) == ("ok", found)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    verdict, printed = check(capsys, str(model))
    assert verdict == "note"
    assert "none: config.json has is_causal: false" in printed
