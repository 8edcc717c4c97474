"""The virtual clock with its two-lane link, and the event ring."""

from __future__ import annotations

import threading

import pytest
from twofold import _testing as testing

from tests.engine.fixed_cost import fixed_cost


def test_demand_uploads_queue_in_order():
    t = testing.Timeline(100.0)
    first, second = t.upload(1), t.upload(2)
    assert (first.begin_us, first.end_us, second.begin_us, second.end_us) == (0, 100, 100, 200)
    assert t.backlog_us == 200
    t.advance(150)
    assert t.backlog_us == 50
    assert [u.tag for u in t.take_landed()] == [1]
    t.advance(50)
    assert [u.tag for u in t.take_landed()] == [2]
    assert t.take_landed() == []


def test_demand_overtakes_background_that_has_not_begun():
    t = testing.Timeline(100.0)
    t.upload(10, testing.UploadLane.BACKGROUND)
    t.upload(11, testing.UploadLane.BACKGROUND)
    assert t.backlog_us == 0
    assert t.queued_us == 200
    t.advance(30)  # 10 is under way
    assert t.backlog_us == 70
    demand = t.upload(1)
    assert (demand.begin_us, demand.end_us) == (100, 200)
    t.advance(300)
    assert [(u.tag, u.lane, u.begin_us, u.end_us) for u in t.take_landed()] == [
        (10, testing.UploadLane.BACKGROUND, 0, 100),
        (1, testing.UploadLane.DEMAND, 100, 200),
        (11, testing.UploadLane.BACKGROUND, 200, 300),
    ]


def test_background_can_be_withdrawn_until_it_begins():
    t = testing.Timeline(100.0)
    t.upload(1, testing.UploadLane.BACKGROUND)
    t.upload(2, testing.UploadLane.BACKGROUND)
    t.advance(10)
    assert not t.cancel_background(1)
    assert t.cancel_background(2)
    assert not t.cancel_background(2)
    t.drain()
    assert [u.tag for u in t.take_landed()] == [1]
    assert t.now_us == 100


def test_timeline_lands_uploads_at_the_cost_models_time():
    cost = fixed_cost()
    t = testing.Timeline(cost.upload_us())
    t.upload(7, testing.UploadLane.BACKGROUND)
    t.advance(50)
    _, landed = cost.layer([1], [1, 1], [1], t.backlog_us, t.queued_us)
    ends = [t.upload(i).end_us - t.now_us for i in range(2)]
    assert ends == pytest.approx(landed)


def test_timeline_refuses_nonsense():
    with pytest.raises(ValueError, match="upload_us"):
        testing.Timeline(0.0)
    with pytest.raises(ValueError, match="advance by us = -1"):
        testing.Timeline(1.0).advance(-1.0)


def test_ring_keeps_order_drops_and_counts_when_full():
    ring = testing.IntEventRing(4)
    assert [ring.push(i) for i in range(6)] == [True] * 4 + [False] * 2
    assert (ring.size, ring.dropped) == (4, 2)
    assert ring.drain(3) == [0, 1, 2]
    assert ring.push(9)
    assert ring.drain(10) == [3, 9]
    assert ring.take_dropped() == 2
    assert ring.dropped == 0
    with pytest.raises(ValueError, match="power of two"):
        testing.IntEventRing(6)


def test_ring_loses_nothing_unseen_with_several_producers():
    ring = testing.IntEventRing(256)
    per_thread, producers = 2000, 3
    threads = [
        threading.Thread(target=lambda base=p * per_thread: [ring.push(base + i) for i in range(per_thread)])
        for p in range(producers)
    ]
    seen: list[int] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen += ring.drain(64)
    seen += ring.drain(1000)
    assert len(seen) + ring.dropped == per_thread * producers
    assert len(set(seen)) == len(seen)
    for p in range(producers):  # each producer's events stay in its order
        own = [x for x in seen if x // per_thread == p]
        assert own == sorted(own)
