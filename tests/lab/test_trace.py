"""Traces from files: what is accepted, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.tools.lab.trace import load_trace, make_trace


def arrays(tokens: int = 12, layers: int = 2, experts: int = 8, top_k: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    ids = np.array(
        [[rng.choice(experts, top_k, replace=False) for _ in range(layers)] for _ in range(tokens)]
    )
    ids[0, 0] = [0, experts - 1]
    return {
        "ids": ids.astype(np.uint8),
        "probs": np.full(ids.shape, 1 / top_k, np.float16),
        "offsets": np.array([0, 5, 6, tokens]),
    }


def save(path: Path, **changes: object) -> Path:
    np.savez(path, **{k: v for k, v in (arrays() | changes).items() if v is not None})
    return path


def test_a_good_file(tmp_path):
    trace = load_trace(save(tmp_path / "small-model.npz"))
    assert (trace.name, trace.num_tokens, trace.num_layers, trace.top_k) == ("small-model", 12, 2, 2)
    assert (trace.num_experts, trace.num_sequences) == (8, 3)
    assert trace.probs is not None
    assert trace.probs.dtype == np.float32
    assert sum(trace.usage()) == 12 * 2 * 2


def test_probs_and_offsets_may_be_absent(tmp_path):
    trace = load_trace(save(tmp_path / "t.npz", probs=None, offsets=None))
    assert trace.probs is None
    assert list(trace.offsets) == [0, 12]
    assert trace.part("second").num_tokens == 12, "a single sequence is not cut"


def test_parts_keep_sequences_whole(tmp_path):
    trace = load_trace(save(tmp_path / "t.npz"))
    first, second = trace.part("first"), trace.part("second")
    assert list(first.offsets) == [0, 5]
    assert list(second.offsets) == [0, 1, 7]
    assert np.array_equal(np.concatenate([first.ids, second.ids]), trace.ids)
    assert second.num_experts == 8


def test_number_of_experts(tmp_path):
    assert load_trace(save(tmp_path / "a.npz"), 16).num_experts == 16
    assert load_trace(save(tmp_path / "b.npz", num_experts=np.array(32))).num_experts == 32
    with pytest.raises(ConfigError, match="holds expert 7, but there are 6 experts"):
        load_trace(save(tmp_path / "c.npz"), 6)
    with pytest.raises(ConfigError, match="expected one integer"):
        load_trace(save(tmp_path / "d.npz", num_experts=np.array([1.5, 2.5])))


def test_missing_truncated_and_foreign_files(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.npz: no such file"):
        load_trace(tmp_path / "nothing.npz")
    whole = save(tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.npz: .*expected an npz with 'ids'"):
            load_trace(cut)
    foreign = tmp_path / "foreign.npz"
    foreign.write_text("hello, I am text")
    with pytest.raises(ConfigError, match=r"foreign\.npz: cannot be read"):
        load_trace(foreign)
    np.savez(foreign, weights=np.ones(3))
    with pytest.raises(ConfigError, match=r"holds weights; expected an npz with 'ids'"):
        load_trace(foreign)
    single = tmp_path / "single.npy"
    np.save(single, np.ones(3))
    with pytest.raises(ConfigError, match=r"cannot be read: truncated or not an npz file"):
        load_trace(single)


def test_pickles_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(save(tmp_path / "evil.npz", ids=np.array([{"a": 1}, print], dtype=object)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ids": np.zeros((4, 2), np.uint8)},
            r"shape \(4, 2\); expected integers of shape \(tokens, layers, top_k\)",
        ),
        ({"ids": np.zeros((4, 2, 1))}, "float64"),
        ({"ids": np.zeros((0, 2, 1), int)}, "empty"),
        ({"ids": np.full((12, 2, 1), -3), "probs": None}, "holds -3; expected expert numbers"),
        ({"ids": np.full((12, 2, 1), 70_000), "probs": None}, "holds 70000"),
        ({"ids": np.full((12, 2, 2), 5)}, "expert 5 routed twice at token 0, layer 0"),
        ({"probs": np.ones((12, 2, 3))}, r"'probs' is float64 of shape \(12, 2, 3\)"),
        ({"probs": np.full((12, 2, 2), np.nan)}, "holds a NaN"),
        ({"offsets": np.array([0, 4])}, r"offsets must rise from 0 to the number of tokens \(12\)"),
        ({"offsets": np.array([0, 9, 4, 12])}, "offsets must rise"),
        ({"offsets": np.array([0.0, 12.0])}, "'offsets' is float64"),
    ],
)
def test_arrays_that_contradict(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_trace(save(tmp_path / "bad.npz", **changes))


def test_make_trace_copies_nothing_it_need_not():
    a = arrays()
    trace = make_trace("x", a["ids"].astype(np.uint16), None, a["offsets"], 8)
    assert trace.ids.flags.c_contiguous
