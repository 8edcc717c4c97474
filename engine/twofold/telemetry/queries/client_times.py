"""Times of requests by the wall clock, as clients feel them: TTFT, TPOT, end to end, and the parts before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, case, func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.requests import Request, requests
from twofold.telemetry.queries.runs import Database, Run, Window

F64 = npt.NDArray[np.float64]

MAX_REQUESTS: Final = 20_000
"""Latest finished requests of a window that are read."""

PARTS_BEFORE: Final = (
    ("read_s", "read"),
    ("parse_wait_s", "wait to be parsed"),
    ("parse_s", "parse"),
    ("encode_s", "pictures"),
    ("tokenise_wait_s", "wait for a tokeniser"),
    ("template_s", "chat template"),
    ("tokenise_s", "tokenise"),
    ("compile_s", "compile the constraint"),
    ("queue_wall_s", "queue"),
    ("prefill_wall_s", "prefill"),
    ("decode_wall_s", "decode"),
)
"""Columns of table request that follow one another in time, where they are recorded, and their names on a page."""


def first_token_s() -> ColumnElement[float]:
    """Unix time at which the first token was sent, where recorded, else computed; NULL before that."""
    columns = schema.request.c
    return func.coalesce(columns.first_sent_s, columns.first_token_s)


def ttft_s() -> ColumnElement[float]:
    """Time to first token of a request; NULL before it."""
    return first_token_s() - schema.request.c.received_s


def e2e_s() -> ColumnElement[float]:
    """Time from a request's begin to its end; NULL before that."""
    return schema.request.c.finished_s - schema.request.c.received_s


def tpot_s() -> ColumnElement[Any]:
    """Time per output token (TPOT) of an answer; NULL with fewer than two tokens."""
    columns = schema.request.c
    further = case((columns.completion_tokens > 1, columns.completion_tokens - 1))
    return (columns.finished_s - columns.first_token_s) / further


@dataclass(frozen=True)
class ClientTimes:
    """Finished requests by the wall clock, in order of their end; arrays are [requests], NaN where unknown."""

    finished_s: F64
    ttft_s: F64
    tpot_s: F64
    """Mean of each answer."""
    e2e_s: F64
    prompt_tokens: F64
    cached_tokens: F64
    """Prompt tokens found in the prefix cache."""

    def cached_share(self, *, max_buckets: int = 60) -> tuple[F64, F64]:
        """(starts, share of the prompts' tokens found in the prefix cache) of buckets; NaN where no request ended."""
        if not len(self.finished_s):
            return np.zeros(0), np.zeros(0)
        first_s = self.finished_s.min()
        bucket_s = max(1.0, float(np.ceil((self.finished_s.max() - first_s + 1e-9) / max_buckets)))
        bucket = ((self.finished_s - first_s) // bucket_s).astype(np.int64)
        cached, prompts = (np.bincount(bucket, tokens) for tokens in (self.cached_tokens, self.prompt_tokens))
        with np.errstate(invalid="ignore"):
            return first_s + bucket_s * np.arange(len(prompts)), cached / prompts


def client_times(db: Database, run: Run, span: Window) -> ClientTimes:
    """Requests that finished within the window without an error: the latest MAX_REQUESTS."""
    columns = schema.request.c
    query = (
        select(columns.finished_s, ttft_s(), tpot_s(), e2e_s(), columns.prompt_tokens, columns.cached_tokens)
        .where(
            columns.run_id == run.run_id,
            columns.finished_s >= span.begin_s,
            columns.finished_s < span.end_s,
            columns.finish_reason.in_(("stop", "length")),
        )
        .order_by(columns.finished_s.desc())
        .limit(MAX_REQUESTS)
    )
    rows = np.array([tuple(row) for row in db.rows(query)][::-1], np.float64).reshape(-1, 6)
    return ClientTimes(*(np.ascontiguousarray(column) for column in rows.T))


@dataclass(frozen=True)
class Part:
    """A part of a request's time by the wall clock."""

    name: str
    begin_s: float
    """Since the request began."""
    duration_s: float


def waterfall(request: Request) -> list[Part]:
    """The parts of a request's wall time one after another; where the server recorded none, what the stamps tell."""
    known = [(name, getattr(request, column)) for column, name in PARTS_BEFORE]
    if not any(duration_s for _, duration_s in known):  # recorded before version 5
        known = []
    if not known and request.first_token_s is not None:
        known = [("queue and prefill", request.first_token_s - request.submitted_s)]
        if request.finished_s is not None:
            known.append(("decode", request.finished_s - request.first_token_s))
    parts, at_s = [], 0.0
    for name, duration_s in known:
        parts.append(Part(name, at_s, max(duration_s, 0.0)))
        at_s += parts[-1].duration_s
    return parts


ORDERS: Final[dict[str, Callable[[], ColumnElement[Any]]]] = {
    "newest": lambda: schema.request.c.number,
    "ttft": ttft_s,
    "tpot": tpot_s,
    "gap": lambda: schema.request.c.longest_gap_s,
    "e2e": e2e_s,
    "prompt": lambda: schema.request.c.prompt_tokens,
    "answer": lambda: schema.request.c.completion_tokens,
}
"""Quantities by which requests can be sorted, largest first."""


def sorted_requests(
    db: Database,
    run: Run,
    *,
    order: str = "newest",
    search: str = "",
    ended_by: str | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[Request]:
    """A page of the requests that match, largest value of `order` (of ORDERS) first."""
    column = ORDERS[order]()
    return requests(db, run, search=search, ended_by=ended_by, limit=limit, offset=offset, order_by=column)


def times_at_client(request: Request) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT and end-to-end seconds of one request by the wall clock; None where not yet known."""
    first = request.first_token_s if request.first_sent_s is None else request.first_sent_s
    ttft = None if first is None else first - request.received_s
    if request.finished_s is None:
        return ttft, None, None
    tpot = None
    if request.first_token_s is not None and request.completion_tokens > 1:
        tpot = (request.finished_s - request.first_token_s) / (request.completion_tokens - 1)
    return ttft, tpot, request.finished_s - request.received_s
