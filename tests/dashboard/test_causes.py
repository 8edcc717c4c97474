"""What a page says of a slow step: the part that grew most, and a cause that its counters support."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard import causes
from tests.dashboard.step_figures import step_figures

CAUSES = [
    ("as usual", {"wall_us": 1100.0}, ("as long as usual",)),
    ("busy core", {"wall_us": 5000.0, "switches": 3}, ("another process", "3 times")),
    ("stopped", {"wall_us": 51_000.0}, ("did not run", "stopped or waited")),
    ("disk", {"wall_us": 9000.0, "faults": 40, "switches": 1}, ("40 pages were read from disk",)),
    ("prefill", {"wall_us": 9000.0, "cpu_us": 18_000.0, "prefill": 700}, ("700 of their tokens",)),
    ("work", {"wall_us": 2000.0, "cpu_us": 4000.0}, ("it computed more",)),
    ("no counters", {"wall_us": 2000.0, "cpu_us": None}, ("no cause is known",)),
]


@pytest.mark.parametrize(("name", "step", "expected"), CAUSES, ids=[name for name, *_ in CAUSES])
def test_the_cause_of_a_slow_step_is_named(
    name: str, step: dict[str, Any], expected: tuple[str, ...]
) -> None:
    found = causes.sentences(step_figures(**step), step_figures())
    text = " ".join(found).lower()
    assert all(each in text for each in expected), text
    if name != "as usual":
        assert found[0].startswith("Most of the delay is **experts on the CPU**")
    others = [each for other, _, phrases in CAUSES for each in phrases if other != name]
    assert not any(each in text for each in others)


def test_the_part_that_grew_most_is_named_not_the_largest() -> None:
    parts = {"experts_cpu": 700.0, "attention": 200.0, "emit": 600.0}
    step = step_figures(wall_us=1500.0, parts_us=parts, switches=1)
    assert causes.sentences(step, step_figures())[0] == (
        "Most of the delay is **detokenising and sending**: 600 µs, usually 100 µs (100% of what the step took longer)."
    )


def test_an_emulated_clock_is_explained_apart() -> None:
    usual = step_figures(emulated_us={"link": 10.0, "dense": 90.0})
    found = causes.sentences(step_figures(emulated_us={"link": 110.0, "dense": 90.0}), usual)
    assert found[0] == "By the wall clock it took as long as usual."
    assert found[1].startswith(
        "On the emulated clock: most of the delay is **waiting for the link**: 110 µs, usually"
    )
