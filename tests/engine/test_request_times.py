"""Wall times in a request's record: the server's parts, then queue, prefill and decode without a gap."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from twofold.api.request_times import PARTS, RequestTimes
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine.requests import RequestState
from twofold.step.sequences import Sequence
from twofold.text.tokenizer import Tokenizer

from tests.tiny_models.writing import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path, TinyModel())
    return Tokenizer.load(path)


def state_of(tokenizer: Tokenizer, times: RequestTimes | None) -> RequestState:
    request = GenerationRequest((5, 6), SamplingParams(max_tokens=2), request_id="timed", times=times)
    return RequestState(Sequence(0, request, [5, 6], 2), tokenizer.detokenizer(), None, 0.0)


def test_the_queue_starts_after_the_servers_own_work(tokenizer: Tokenizer) -> None:
    now = time.perf_counter()
    parts = {**dict.fromkeys(PARTS, 0.0), "read": 2.0, "tokenise": 3.0}
    times = RequestTimes(now - 60, time.time() - 60, now - 55, parts, first_sent_s=77.0)
    state = state_of(tokenizer, times)
    state.scheduled(0.0)
    state.push(7, 0.0)
    usage = state.finish("length", 0.0, "virtual")
    record = state.record()
    assert (record.read_s, record.tokenise_s, record.template_s, record.first_sent_s) == (2.0, 3.0, 0.0, 77.0)
    assert record.received_s == times.received_s
    assert record.queue_wall_s == pytest.approx(55, abs=5)
    assert (record.queue_wall_s, record.prefill_wall_s, record.decode_wall_s) == usage.wall_s
    assert state.record() == record, "a record of a finished request no longer grows"


def test_a_phase_in_which_a_request_ends_lasts_until_its_end(tokenizer: Tokenizer) -> None:
    waiting, running = state_of(tokenizer, None), state_of(tokenizer, None)
    running.scheduled(0.0)
    (queue_s, *others), (_, prefill_s, decode_s) = (
        each.finish("cancelled", 0.0, "wall").wall_s for each in (waiting, running)
    )
    assert queue_s > 0
    assert others == [0.0, 0.0]
    assert prefill_s > 0
    assert decode_s == 0


def test_a_request_without_a_server_is_received_when_submitted(tokenizer: Tokenizer) -> None:
    record = state_of(tokenizer, None).record()
    assert record.received_s == record.submitted_s > 0
    assert record.first_sent_s is None
    assert record.queue_wall_s == record.read_s == 0


def test_the_longest_gap_is_between_two_tokens(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(tokenizer, None)
    state.scheduled(0.0)
    begun_s = time.perf_counter()
    for at_s in (70.0, 71.0, 75.0, 77.0):  # the first token's wait is no gap
        monkeypatch.setattr(time, "perf_counter", lambda at_s=at_s: begun_s + at_s)
        state.push(7, 0.0)
        if at_s == 70:
            assert state.record().longest_gap_s is None
    assert state.record().longest_gap_s == pytest.approx(4.0)


@pytest.mark.parametrize("has_server", [False, True])
def test_durations_survive_a_clock_that_is_set(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, has_server: bool
) -> None:
    times = RequestTimes.begin() if has_server else None
    state = state_of(tokenizer, times)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 3600)
    state.scheduled(0.0)
    state.push(7, 0.0)
    monkeypatch.setattr(time, "time", lambda: clock() + 7200)
    state.finish("length", 0.0, "wall")
    record = state.record()
    assert record.first_token_s is not None
    assert record.finished_s is not None
    assert record.received_s <= record.submitted_s < record.first_token_s < record.finished_s
    assert record.finished_s - record.received_s < 60
