"""Where the experts of an answer's tokens ran, read from the telemetry database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from twofold.telemetry import queries
from twofold.telemetry.sink import Placement

MAX_TOKENS: Final = 4096
"""Most tokens of one answer; later ones are left out."""


def answer_placement(url: str, run_ids: Iterable[int | None], request_id: str) -> dict[str, Any] | None:
    """Per generated token: experts by place and the time of its step; None if none of
    these runs has such a request (yet).

    A token's entry belongs to the step that computed it, so entry 0 is the end of the prompt's computation. Tokens
    whose rows were dropped or removed have null. ConfigError if the database is unreadable.
    """
    db = queries.open_database(url)
    try:
        for run_id in run_ids:
            if run_id is None:
                continue
            run = queries.find_run(db, run_id)
            found = [
                each for each in queries.requests(db, run, search=request_id) if each.request_id == request_id
            ]
            if found:
                break
        else:
            return None
        first = found[0].prompt_tokens - 1
        tokens = queries.request_tokens(
            db, run, found[0].number, first_position=first, last_position=first + MAX_TOKENS - 1
        )
    finally:
        db.engine.dispose()
    entries: list[dict[str, Any] | None] = [None] * (
        int(tokens.position.max()) - first + 1 if len(tokens.position) else 0
    )
    by_place = tokens.num_by_placement.sum(axis=1)
    for position, places, step_us in zip(tokens.position.tolist(), by_place, tokens.step_us, strict=True):
        entries[position - first] = {
            **{place.name.lower(): int(places[place]) for place in Placement},
            "step_us": None if np.isnan(step_us) else float(step_us),
        }
    return {
        "request_id": request_id,
        "accelerator": run.accelerator,
        "emulated": run.emulated,
        "tokens": entries,
    }
