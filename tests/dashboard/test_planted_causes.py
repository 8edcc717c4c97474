"""The dashboard names the cause of a slow step: real engines, and causes that were planted in their steps.

Each plant takes many times as long as a step. Where the machine is busy, another cause may truly have taken longer, so
most of a few trials decide. `python -m tests.dashboard.planted_causes` makes 200 trials of each.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.dashboard.planted_causes import PLANTS, trials

NUM_TRIALS = 5
ROUNDS = 3
"""A round has NUM_TRIALS trials. A cause passes if most trials of one round name it."""
EMULATED_TOO = ("stopped", "prompt", "collection")
GROUPS = [
    ("none", tuple(kind for kind, how in PLANTS.items() if how == "none")),
    ("packed", tuple(kind for kind, how in PLANTS.items() if how == "packed")),
    ("emulated", (*(kind for kind, how in PLANTS.items() if how == "emulated"), *EMULATED_TOO)),
]


@pytest.mark.parametrize(("how", "kinds"), GROUPS, ids=[how for how, _ in GROUPS])
def test_a_planted_cause_is_named_first(tmp_path: Path, how: str, kinds: tuple[str, ...]) -> None:
    missing = list(kinds)
    seen: dict[str, Counter[str | None]] = {kind: Counter() for kind in kinds}
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = trials(how, missing, NUM_TRIALS, folder)
        assert all(cause is None for ratio, cause in found.pop("quiet") if ratio < 1.15)
        for kind, results in found.items():
            of_round = Counter(cause for _, cause in results)
            seen[kind] += of_round
            if of_round[kind] > NUM_TRIALS // 2:
                missing.remove(kind)
        if not missing:
            return
    raise AssertionError({kind: seen[kind] for kind in missing})
