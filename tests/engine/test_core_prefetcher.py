"""The prefetcher: earliest deadline first, priced, late work dropped, predictions counted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core


def request(layer, expert, probability=0.9, deadline=1000.0):
    return _core.PrefetchRequest(layer, expert, probability, deadline)


def taken(prefetcher, now=0.0, upload=10.0):
    found = prefetcher.next(now, upload)
    return None if found is None else (found.layer, found.expert)


def test_earliest_deadline_first_then_probability():
    p = _core.Prefetcher(4, 8, 0.1)
    p.offer(
        [request(3, 0, 0.9, 300), request(1, 1, 0.5, 100), request(1, 2, 0.8, 100), request(2, 3, 0.9, 200)]
    )
    assert [taken(p) for _ in range(5)] == [(1, 2), (1, 1), (2, 3), (3, 0), None]


def test_late_work_is_dropped_and_counted():
    p = _core.Prefetcher(4, 8, 0.1)
    p.offer([request(1, 1, deadline=50), request(2, 2, deadline=100)])
    assert taken(p, now=45, upload=10) == (2, 2)
    assert p.counts.num_late == 1


def test_worth_is_probability_times_weight_against_the_price():
    p = _core.Prefetcher(2, 8, 0.5, [1.0, 3.0])
    p.offer([request(0, 0, 0.5), request(0, 1, 0.51), request(1, 2, 0.2)])
    assert p.counts.num_refused == 1
    assert [taken(p) for _ in range(3)] == [(0, 1), (1, 2), None]


def test_a_second_prediction_sharpens_the_first():
    p = _core.Prefetcher(4, 8, 0.1)
    p.offer([request(3, 5, 0.4, 400), request(2, 1, 0.9, 300)])
    p.offer([request(3, 5, 0.8, 200)])
    assert p.num_queued == 2
    first = p.next(0.0, 10.0)
    assert (first.layer, first.expert, first.probability, first.deadline_us) == (3, 5, 0.8, 200)
    p.offer([request(3, 5)])
    assert p.num_queued == 1, "what is under way is not queued again"


def test_precision_and_recall_by_hand():
    p = _core.Prefetcher(2, 8, 0.3)
    p.offer([request(0, 1), request(0, 2), request(0, 3, 0.2)])  # 3 is foreseen, but not worth it
    assert (taken(p), taken(p)) == ((0, 1), (0, 2))
    # Routed 1, 3, 4, 5; 5 was resident. Of the issued (1, 2) one was right; of the misses (1, 3, 4) two were foreseen.
    p.settle(0, [1, 3, 4, 5], [1, 3, 4])
    assert p.counts.precision == 1 / 2
    assert p.counts.recall == pytest.approx(2 / 3)
    p.settle(1, [0, 1], [0, 1])  # nothing was predicted for this layer: it says nothing about recall
    assert p.counts.recall == pytest.approx(2 / 3)


def test_settling_drops_what_is_still_queued_for_the_layer():
    p = _core.Prefetcher(2, 8, 0.3)
    p.offer([request(0, 1), request(1, 2)])
    p.settle(0, [1], [1])
    assert (p.num_queued, p.counts.num_late) == (1, 1)
    p.clear()
    assert taken(p) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(0, 1), st.floats(0, 200)), max_size=40
    ),
    st.floats(0, 100),
)
def test_what_is_issued_lands_in_time_in_order_and_once(offers, now):
    p = _core.Prefetcher(4, 6, 0.25)
    p.offer([request(*offer) for offer in offers])
    issued = []
    while (found := p.next(now, 10.0)) is not None:
        issued.append(found)
    assert all(r.deadline_us >= now + 10 and r.probability > 0.25 for r in issued)
    assert [r.deadline_us for r in issued] == sorted(r.deadline_us for r in issued)
    assert len({(r.layer, r.expert) for r in issued}) == len(issued) == p.counts.num_issued
    assert p.num_queued == 0


def test_nonsense_is_named():
    with pytest.raises(ValueError, match="price = -1"):
        _core.Prefetcher(1, 1, -1.0)
    with pytest.raises(ValueError, match="0 layers"):
        _core.Prefetcher(0, 1, 0.5)
    with pytest.raises(ValueError, match="layer_weight of 1 entries"):
        _core.Prefetcher(2, 1, 0.5, [1.0])
    p = _core.Prefetcher(2, 4, 0.5)
    with pytest.raises(ValueError, match="layer 2, expert 0"):
        p.offer([request(2, 0)])
    with pytest.raises(ValueError, match=r"probability 1\.5"):
        p.offer([request(0, 0, 1.5)])
    with pytest.raises(ValueError, match="finite time"):
        p.offer([request(0, 0, 0.5, math.inf)])
