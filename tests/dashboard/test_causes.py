"""What a page says of a slow step: the part that grew most, and a cause that its counters support."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard import causes
from tests.dashboard.step_figures import step_figures

STOPPED = {"wall_us": 51_000.0}
COMPUTED = {"wall_us": 9000.0, "engine_cpu_us": 8900.0, "cpu_us": 17_800.0}
CAUSES = [
    ("as usual", {"wall_us": 1100.0}, ("as long as usual",)),
    (
        "busy core",
        {"wall_us": 5000.0, "core_wait_us": 4000.0, "involuntary_switches": 3},
        ("another process", "3 times"),
    ),
    ("busy pool", {"wall_us": 5000.0, "others_core_wait_us": 4000.0}, ("another process", "4.0 ms")),
    (
        "busy core, switches alone are known",
        {"wall_us": 5000.0, "core_wait_us": None, "involuntary_switches": 3},
        ("another process", "3 times"),
    ),
    (
        "own threads",
        {"wall_us": 15_000.0, "core_wait_us": 14_000.0, "others_cpu_us": 13_000.0},
        ("own other threads computed",),
    ),
    (
        "pinned",
        {"wall_us": 5000.0, "core_wait_us": 4000.0, "num_pinned_threads": 1},
        ("was pinned to fewer cores",),
    ),
    ("stopped", STOPPED, ("did not run for 50.0 ms", "stopped, or it waited")),
    ("lock", {"parts_us": {"emit": 50_000.0}, **STOPPED, "others_cpu_us": 49_000.0}, ("interpreter's lock",)),
    ("collection", {**COMPUTED, "collection_us": 7000.0, "num_full_collections": 1}, ("garbage", "7.0 ms")),
    (
        "collection in another thread",
        {"wall_us": 9000.0, "collection_us": 7000.0, "num_full_collections": 1},
        ("garbage", "7.0 ms"),
    ),
    ("disk", {"wall_us": 9000.0, "major_faults": 40}, ("40 pages were read from disk",)),
    ("memory", {**COMPUTED, "minor_faults": 4000}, ("4,000 pages of memory",)),
    ("prompt", {**COMPUTED, "prefill": 700}, ("700 prompt tokens",)),
    ("work", COMPUTED, ("no cause is known: its cpu time grew",)),
    (
        "counted later",
        {**STOPPED, "num_counted_steps": None, "cpu_us": None},
        ("no cause is known", "with a later one"),
    ),
    (
        "no counters",
        {"wall_us": 2000.0, "cpu_us": None, "engine_cpu_us": None},
        ("no cause is known", "did not record"),
    ),
]


@pytest.mark.parametrize(("name", "step", "expected"), CAUSES, ids=[name for name, *_ in CAUSES])
def test_the_cause_of_a_slow_step_is_named(
    name: str, step: dict[str, Any], expected: tuple[str, ...]
) -> None:
    found = causes.sentences(step_figures(**step), step_figures())
    text = " ".join(found).lower()
    assert all(each in text for each in expected), text
    assert len(found) == 1 if name == "as usual" else found[0].startswith("Most of the delay is **")


def test_what_a_counter_saw_in_earlier_steps_is_not_charged_to_this_one() -> None:
    """A reading covers up to 32 steps: their usual waits and faults are theirs."""
    usual = step_figures(core_wait_us=200.0, minor_faults=100.0)
    step = step_figures(wall_us=4000.0, core_wait_us=16 * 200.0, minor_faults=1600.0, num_counted_steps=16.0)
    cause = causes.cause_of(step, usual)
    assert cause is not None
    assert cause.kind == "stopped"
    # Another thread's wait may have begun in them.
    step = step_figures(wall_us=4000.0, others_core_wait_us=9000.0, num_counted_steps=16.0)
    cause = causes.cause_of(step, step_figures())
    assert cause is not None
    assert cause.kind == "stopped"


def test_few_prompt_tokens_do_not_explain_a_long_delay() -> None:
    step = step_figures(wall_us=51_000.0, prefill=2)
    assert (cause := causes.cause_of(step, step_figures())) is not None
    assert cause.kind == "stopped"


def test_the_part_that_grew_most_is_named_not_the_largest() -> None:
    parts = {"experts_cpu": 700.0, "attention": 200.0, "emit": 600.0}
    step = step_figures(wall_us=1500.0, parts_us=parts)
    assert causes.sentences(step, step_figures())[0] == (
        "Most of the delay is **detokenising and sending**: 600 µs, usually 100 µs (100% of what the step took longer)."
    )


def test_an_emulated_clock_is_explained_apart() -> None:
    usual = step_figures(emulated_us={"link": 10.0, "dense": 90.0}, misses=4.0, upload_bytes=4e6)
    slow = step_figures(emulated_us={"link": 110.0, "dense": 90.0}, misses=4.0, upload_bytes=4e6)
    found = causes.sentences(slow, usual)
    assert found[0] == "By the wall clock it took as long as usual."
    assert found[1].startswith(
        "On the emulated clock: most of the delay is **waiting for the link**: 110 µs, usually"
    )
    assert "On the emulated clock the cause is this: the link was slow or busy: 4.0" in found[2]
    assert "4 routed experts were not on the GPU, usually 4" in found[2]
    cold = step_figures(emulated_us={"link": 110.0, "dense": 90.0}, misses=44.0, upload_bytes=44e6)
    assert (
        "as with a cold cache: 44 routed experts were not on the GPU, usually 4"
        in causes.sentences(cold, usual)[2]
    )
    unknown = step_figures(emulated_us={"link": 110.0, "dense": 90.0})
    assert causes.sentences(unknown, step_figures(emulated_us={"link": 10.0, "dense": 90.0}))[2:] == [
        "On the emulated clock no cause is known."
    ]


@pytest.mark.parametrize(
    ("misses", "parts", "kind"),
    [
        (40.0, {"experts_gpu": 9000.0}, "cold cache"),
        (4.0, {"experts_gpu": 9000.0}, "slow link"),
        (40.0, {"attention": 9000.0}, "stopped"),  # no expert was waited for
    ],
)
def test_misses_and_the_link_of_a_device_explain_the_wall_clock(
    misses: float, parts: dict[str, float], kind: str
) -> None:
    usual = step_figures(parts_us={"experts_gpu": 900.0}, misses=4.0, upload_bytes=4e6, engine_cpu_us=100.0)
    step = step_figures(wall_us=9100.0, parts_us=parts, misses=misses, upload_bytes=4e6, engine_cpu_us=100.0)
    cause = causes.cause_of(step, usual)
    assert cause is not None
    assert cause.kind == kind
