"""Recorded routing: rows put in order, prompts apart from answers, files whole or absent."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.api.request_record import RequestRecord
from twofold.api.types import RunInfo
from twofold.telemetry.routing import RoutingRecorder, RoutingRows
from twofold.telemetry.sink import TOKEN_LAYER_DTYPE

RUN = RunInfo("m", "A", "none", "", "wall", "", 2, 300, 3, 0, 1, "generic", 1, "0", "{}")


def events(request, positions, layers=(0, 1), first_expert=0):
    rows = np.zeros(len(positions) * len(layers), TOKEN_LAYER_DTYPE)
    for i, (position, layer) in enumerate((p, layer) for p in positions for layer in layers):
        rows[i]["request"], rows[i]["position"], rows[i]["layer"] = request, position, layer
        rows[i]["experts"][:3] = first_expert + 100 * layer + position + np.arange(3)
        rows[i]["weights"][:3] = (0.5, 0.3, 0.2)
    return rows


def record(number, prompt_tokens):
    return RequestRecord(number, f"r{number}", "", 0.0, None, None, prompt_tokens, 0, None)


def test_rows_are_ordered_by_position_in_any_input_order():
    rows = RoutingRows(2, 300, 3)
    rows.add(events(0, [2], layers=(1, 0)))
    rows.add(events(0, [0, 1]))
    ids, probs = rows.arrays()
    assert ids.dtype == np.uint16
    assert ids[:, 0, 0].tolist() == [0, 1, 2]
    assert ids[2, 1].tolist() == [102, 103, 104]
    assert probs.dtype == np.float16
    assert probs[0, 0].tolist() == np.array([0.5, 0.3, 0.2], np.float16).tolist()


def test_a_token_computed_again_after_preemption_counts_once():
    rows = RoutingRows(2, 300, 3)
    rows.add(events(0, [0, 1]))
    rows.add(events(0, [0, 1, 2], first_expert=7))
    assert rows.arrays()[0][:, 0, 0].tolist() == [7, 8, 9]


def test_a_gap_ends_the_request_instead_of_shifting_it():
    rows = RoutingRows(2, 300, 3)
    rows.add(events(0, [0, 1]))
    rows.add(events(0, [2], layers=(0,)))
    rows.add(events(0, [3]))
    assert len(rows.arrays()[0]) == 2


def test_up_to_256_experts_fit_a_byte():
    assert RoutingRows(2, 256, 3).arrays()[0].dtype == np.uint8


@pytest.mark.parametrize(("keep", "lengths"), [("answer", [2, 1]), ("all", [5, 3])])
def test_the_file_holds_sequences_apart(tmp_path, keep, lengths):
    path = tmp_path / "routing.npz"
    recorder = RoutingRecorder(path, keep=keep)
    recorder.begin_run(RUN)
    recorder.request(record(4, 3))
    recorder.request(record(9, 2))
    mixed = np.concatenate([events(4, range(4)), events(9, range(3), first_expert=50)])
    recorder.native_events("token_layer", mixed[::-1].copy())
    recorder.native_events("token_layer", events(4, [4]))
    recorder.native_events("upload", np.zeros(1))
    recorder.close()
    recorder.close()
    with np.load(path, allow_pickle=False) as file:
        offsets = file["offsets"]
        assert np.diff(offsets).tolist() == lengths
        assert int(file["num_experts"]) == 300
        assert file["ids"].shape == file["probs"].shape == (sum(lengths), 2, 3)
        first = 3 if keep == "answer" else 0
        assert file["ids"][0, 0, 0] == first
    assert [p.name for p in tmp_path.iterdir()] == ["routing.npz"]


def test_too_many_events_are_dropped_and_counted(tmp_path):
    recorder = RoutingRecorder(tmp_path / "r.npz", max_events=7)
    recorder.begin_run(RUN)
    recorder.request(record(0, 0))
    recorder.native_events("token_layer", events(0, [0, 1]))
    recorder.native_events("token_layer", events(0, [2, 3]))
    recorder.dropped("token_layer", 5)
    assert recorder.num_dropped == 4 + 5
    recorder.close()
    with np.load(tmp_path / "r.npz") as file:
        assert len(file["ids"]) == 2


@pytest.mark.parametrize("name", ["missing/r.npz", "routing.txt"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(ConfigError, match="--record-routing"):
        RoutingRecorder(tmp_path / name)
