"""The small model that reads pictures of shapes: right answers about pictures that it has not seen."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from twofold.text.tokenizer import Tokenizer

from tests.models.transformers_runs import one_torch_thread

__all__ = ["one_torch_thread"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models/twofold-shapes"


def test_unseen_pictures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twofold's encoder and engine name them, and its tokenizer renders the template as transformers does."""
    monkeypatch.syspath_prepend(str(ROOT / "models/training"))
    import train_shapes_model as shapes

    pairs = list(islice(shapes.pictures(shapes.TRAINED, seed=20_261_128), 60))
    found = shapes.answers(MODEL, [picture for _, picture in pairs])
    right = sum(kind.answer == answer for (kind, _), answer in zip(pairs, found, strict=True))
    assert right >= 0.9 * len(pairs)
    assert len(set(found)) > 25, "the answers differ as the pictures do"

    tokenizer = Tokenizer.load(MODEL)
    parts = [{"type": "image_url"}, {"type": "text", "text": shapes.QUESTION}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    theirs = shapes.transformers.AutoTokenizer.from_pretrained(MODEL)
    assert rendered == shapes.prompt(theirs, "<|image_pad|>")
