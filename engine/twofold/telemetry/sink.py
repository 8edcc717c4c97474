"""`TelemetrySink`, to which the engine pushes events, and the event formats.

Needs only numpy and the native module, so that the engine can use a sink without SQLAlchemy installed. A sink never
blocks its caller, raises no errors from handling an event, and counts what it drops.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import numpy as np

from twofold import _core
from twofold._core import CacheEventKind as CacheEventKind
from twofold._core import Placement as Placement
from twofold._core import UploadReason as UploadReason
from twofold.api.errors import RequestError
from twofold.api.request_record import RequestRecord
from twofold.api.training_step import TrainingStep
from twofold.api.types import ControlRecord, RunInfo, StepRecord

LossPlace = Literal["ring", "queue", "database"]
LOSS_PLACES: Final[tuple[LossPlace, ...]] = ("ring", "queue", "database")
"""Where events are lost: a full native ring, a full queue before the database, the database itself."""

TelemetryLevel = Literal["step", "layer", "expert"]
"""Levels of recording: requests and steps; also sums by second and layer; also every token's experts, every upload and
every decision of the expert cache."""
LEVELS: Final[tuple[TelemetryLevel, ...]] = ("step", "layer", "expert")

EVENT_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    kind: dtype for kind, (dtype, _) in _core.event_formats().items()
}
"""Event formats that `native_events` accepts, from the structs in `engine/runtime/moe/events.h`. The named fields are
required; padding and order are ignored. The database tables and their rows have a column per field, in this order.

Only the first `num_routed` entries of a token_layer event's arrays are valid.
"""

EVENT_MEANINGS: Final[dict[str, dict[str, str]]] = {
    kind: meanings for kind, (_, meanings) in _core.event_formats().items()
}
"""By kind, what each field means; may be empty."""

TOKEN_LAYER_DTYPE: Final = EVENT_DTYPES["token_layer"]
UPLOAD_DTYPE: Final = EVENT_DTYPES["upload"]
CACHE_EVENT_DTYPE: Final = EVENT_DTYPES["cache_event"]


@dataclass(frozen=True)
class LoadSample:
    """One request as a load-test user saw it, over HTTP, by that user's wall clock.

    TTFT is first content token − send; TPOT is (E2E − TTFT) / (completion tokens − 1).
    """

    loadtest_id: Annotated[str, "the same for all samples of one load test"]
    finished_s: Annotated[float, "Unix time at which the answer finished or failed"]
    user: int
    num_users: Annotated[int, "users running at that moment"]
    e2e_ms: Annotated[float, "wall clock of the client"]
    ok: bool
    ttft_ms: Annotated[float | None, "NULL when no token came"] = None
    tpot_ms: Annotated[float | None, "NULL with fewer than two tokens"] = None
    completion_tokens: int = 0
    error: str | None = None
    request_id: Annotated[str | None, "that of table request; NULL where no answer began"] = None
    itl_p95_ms: Annotated[
        float | None, "of this answer's inter-token times; NULL with fewer than two tokens"
    ] = None
    stage: Annotated[str | None, "stage of the load in which the request was sent"] = None
    name: Annotated[str | None, "kind of user, such as chat; NULL for twofold bench serve"] = None
    gave_up: Annotated[bool, "the user closed the connection on purpose; ok is 1"] = False
    prompt_tokens: Annotated[int | None, "NULL where the server reported none"] = None
    itls_json: Annotated[str | None, "inter-token times, JSON array of milliseconds; NULL without any"] = None
    plan_json: Annotated[
        str | None, "mix, shape, length and objectives of the test; of some of its samples only"
    ] = None


@dataclass(frozen=True)
class SinkStats:
    """Rows a database sink has written so far, and events it lost."""

    level: TelemetryLevel
    num_written: int
    """Events and records committed, without roll-ups."""
    num_queued: int
    """Rows accepted but not committed yet."""
    dropped: Mapping[LossPlace, int]
    """Events lost, by place; contains every place."""
    last_error: str | None
    """Why nothing is being written at present; None if there is no error."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


@dataclass(frozen=True)
class RunLabel:
    """What the operator calls a run: a name, and tags with commas between them."""

    name: str = ""
    tags: str = ""


class TelemetrySink:
    """Takes events from any thread; every method returns at once. This base class discards them."""

    wants_text: bool = False
    """Whether requests are to be recorded with the text of their answers."""

    takes_events: bool = True
    """Whether `native_events` keeps anything. If not, native code need not report events."""

    url = ""
    """The database that the events go to; empty if they are discarded."""

    label = RunLabel()
    """Name and tags of the runs that begin from now on."""

    @property
    def run_id(self) -> int | None:
        """The run's number in that database; None before its first row is stored."""
        return None

    def another_run(self) -> TelemetrySink:
        """A sink for a further run, recorded beside this one's. Its `close` ends the run; the database stays open."""
        return TelemetrySink()

    def begin_run(self, run: RunInfo) -> None:
        """First call: everything that follows belongs to this run."""

    def request(self, record: RequestRecord) -> None:
        """Record a request at submission, first token and finish; the last record of a number wins."""

    def step(self, record: StepRecord) -> None:
        """Record an engine iteration."""

    def control(self, record: ControlRecord) -> None:
        """Record that memory was split differently, freed or allocated again."""

    def training_step(self, record: TrainingStep) -> None:
        """Record a step of fine-tuning; the last record of a number wins."""

    def native_events(self, kind: str, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Record a structured array drained from a native ring (see EVENT_DTYPES); copied, so the caller may reuse
        it."""

    def load_samples(self, rows: list[LoadSample]) -> None:
        """Record load-test samples passed on by the server."""

    def dropped(self, kind: str, count: int) -> None:
        """Count events of `kind` that were lost before they got here (a full native ring)."""

    def stats(self) -> SinkStats | None:
        """Recording statistics; None from a sink that keeps no database. From any thread."""
        return None

    def close(self) -> None:
        """Write out everything accepted so far, mark the run as finished, release the database. Idempotent."""


class TeeSink(TelemetrySink):
    """Passes everything to several sinks, in order."""

    def __init__(self, *sinks: TelemetrySink) -> None:
        self._sinks = sinks
        self.wants_text = any(sink.wants_text for sink in sinks)
        self.takes_events = any(sink.takes_events for sink in sinks)
        self.url = next((sink.url for sink in sinks if sink.url), "")

    def begin_run(self, run: RunInfo) -> None:
        for sink in self._sinks:
            sink.begin_run(run)

    def request(self, record: RequestRecord) -> None:
        for sink in self._sinks:
            sink.request(record)

    def step(self, record: StepRecord) -> None:
        for sink in self._sinks:
            sink.step(record)

    def control(self, record: ControlRecord) -> None:
        for sink in self._sinks:
            sink.control(record)

    def training_step(self, record: TrainingStep) -> None:
        for sink in self._sinks:
            sink.training_step(record)

    def native_events(self, kind: str, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
        for sink in self._sinks:
            sink.native_events(kind, rows)

    def load_samples(self, rows: list[LoadSample]) -> None:
        for sink in self._sinks:
            sink.load_samples(rows)

    def dropped(self, kind: str, count: int) -> None:
        for sink in self._sinks:
            sink.dropped(kind, count)

    def stats(self) -> SinkStats | None:
        """Statistics of the first sink that keeps a database."""
        return next((stats for sink in self._sinks if (stats := sink.stats()) is not None), None)

    @property
    def run_id(self) -> int | None:
        """Number of the run in the database of `url`."""
        return next((sink.run_id for sink in self._sinks if sink.url), None)

    def close(self) -> None:
        """Close all sinks, also when one of them fails; raises the first failure at the end."""
        with contextlib.ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def parse_load_samples(body: object, *, max_samples: int = 10_000) -> list[LoadSample]:
    """Parse the decoded JSON body of `POST /internal/load_samples`.

    Expects {"samples": [{...the fields of LoadSample...}, …]}; raises RequestError naming the offending field. Unknown
    fields are ignored.
    """
    samples = body.get("samples") if isinstance(body, dict) else None
    if not isinstance(samples, list):
        raise RequestError('expected a JSON object {"samples": [...]}', param="samples")
    if len(samples) > max_samples:
        raise RequestError(
            f"{len(samples)} samples in one request; send at most {max_samples}", param="samples"
        )
    return [_parse_sample(sample, index) for index, sample in enumerate(samples)]


def _parse_sample(sample: object, index: int) -> LoadSample:
    if not isinstance(sample, dict):
        raise RequestError(f"samples[{index}] is not an object", param=f"samples[{index}]")
    found: dict[str, Any] = {}
    for field in fields(LoadSample):
        kind, value = _KINDS[field.name], sample.get(field.name)
        if value is None and field.default is not MISSING and (kind is not bool or field.name not in sample):
            continue
        expected, holds = _EXPECTED_JSON if field.name.endswith("_json") else _EXPECTED[kind]
        if not holds(value):
            where = f"samples[{index}].{field.name}"
            raise RequestError(f"{where} is {value!r:.80}; expected {expected}", param=where)
        found[field.name] = kind(value)
    return LoadSample(**found)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


_KINDS: Final[Mapping[str, type]] = {
    name: next(each for each in (get_args(hint) or (hint,)) if each is not type(None))
    for name, hint in get_type_hints(LoadSample).items()
}
_EXPECTED: Final[Mapping[type, tuple[str, Callable[[Any], bool]]]] = {
    int: ("a finite number >= 0", _is_count),
    float: ("a finite number >= 0", _is_count),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a text of 1 to 1000 characters", lambda value: isinstance(value, str) and 0 < len(value) <= 1000),
}
"""What a field's value must be, by its type."""
_MAX_JSON: Final = 200_000


def _is_json(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > _MAX_JSON:
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


_EXPECTED_JSON: Final = (f"a JSON text of at most {_MAX_JSON:,} characters", _is_json)


def check_event_dtype(kind: str, rows: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Raise ValueError unless `rows` has the fields of events of `kind` (a bug of the caller)."""
    expected = EVENT_DTYPES.get(kind)
    if expected is None:
        raise ValueError(f"unknown event kind {kind!r}; expected one of {sorted(EVENT_DTYPES)}")
    names: Sequence[str] = rows.dtype.names or ()
    missing = sorted(set(expected.names or ()) - set(names))
    if missing:
        raise ValueError(f"{kind} events lack the fields {missing}; they have {list(names)}")
