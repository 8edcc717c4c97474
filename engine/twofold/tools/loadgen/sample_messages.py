"""Samples as plain values, for the way from a load test's workers to its master."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.metrics import Sample

_SAMPLE: Final = tuple(field.name for field in fields(Sample) if field.name != "answer")
_ANSWER: Final = ("request_id", "prompt_tokens", "cached_tokens", "finish_reason", "_usage_tokens")


def as_message(sample: Sample, clock_offset_s: float) -> dict[str, Any]:
    """The sample without the answer's text. `clock_offset_s`: Unix time minus the clock of the answer's times."""
    answer = sample.answer
    return {
        **{name: getattr(sample, name) for name in _SAMPLE},
        "answer": {
            **{name: getattr(answer, name) for name in _ANSWER},
            "sent_s": answer.sent_s + clock_offset_s,
            "end_s": None if answer.end_s is None else answer.end_s + clock_offset_s,
            "piece_s": [at_s + clock_offset_s for at_s in answer.piece_s],
        },
    }


def from_message(message: Mapping[str, Any]) -> Sample:
    """The inverse of `as_message`; the answer's times are Unix times."""
    answer = dict(message["answer"])
    pieces = array("d", answer.pop("piece_s"))
    return Sample(**{**message, "answer": AnswerStream(**answer, piece_s=pieces)})
