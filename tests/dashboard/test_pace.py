"""The interval of refreshes by their cost."""

from __future__ import annotations

from typing import Any

from dashboard.pace import interval_s, slow_down


def test_a_costly_page_refreshes_less_often() -> None:
    state: dict[str, Any] = {}
    assert interval_s(state, "overview") == 2.0
    assert not slow_down(state, "overview", 0.9)  # fills caches
    assert not slow_down(state, "overview", 0.04)
    assert not slow_down(state, "overview", 0.5)  # once only
    assert slow_down(state, "overview", 0.2)
    assert interval_s(state, "overview") == 10.0
    assert not slow_down(state, "overview", 0.19)
    assert not slow_down(state, "overview", 9.0)
    assert slow_down(state, "overview", 9.0)
    assert interval_s(state, "overview") == 30.0
    assert interval_s(state, "requests") == 2.0
