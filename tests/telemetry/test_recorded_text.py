"""Answers' texts in telemetry: only where they were asked for, one piece per token, and no more than the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine, requests
from twofold.models.bundled import bundled_model_path
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

NUM_TOKENS = 12


def recorded(path: Path, *, text: bool) -> tuple[str, str | None]:
    """The text of an answer by the bundled model, and what telemetry stored of it."""
    url = f"sqlite:///{path / 't.db'}"
    sink = open_sink(url, text=text)
    engine = Engine.load(EngineConfig(model=str(bundled_model_path()), accelerator="none"), telemetry=sink)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    shown: list[str] = []
    engine.generate(
        engine.tokenizer.encode("There was once a"), sampling, lambda chunk: shown.append(chunk.text)
    )
    engine.close()
    sink.close()
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    (request,) = queries.requests(db, run)
    machine = queries.machine_facts(run)
    assert {"processor", "memory", "NUMA nodes", "threads"} <= machine.system.keys()
    assert "torch" in machine.versions
    return "".join(shown), request.answer_json


def test_texts_are_not_stored_by_default(tmp_path: Path) -> None:
    assert recorded(tmp_path, text=False)[1] is None


def test_a_recorded_text_has_a_piece_per_token(tmp_path: Path) -> None:
    old = os.umask(0o022)
    text, stored = recorded(tmp_path, text=True)
    os.umask(old)
    assert stored is not None
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("t.db*")}["t.db"] == "0o600"
    pieces = json.loads(stored)
    assert len(pieces) == NUM_TOKENS
    assert text.startswith("".join(pieces))
    assert len("".join(pieces)) >= NUM_TOKENS


def test_the_end_of_a_long_answer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_RECORDED_TOKENS", 5)
    stored = recorded(tmp_path, text=True)[1]
    assert stored is not None
    assert len(json.loads(stored)) == 5
