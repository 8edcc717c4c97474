"""Random acceptance beside cancelled and preempted requests: no page or record is lost, and answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine.prefix import cache as prefix_cache

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import (
    Asked,
    ScriptedDrafter,
    all_records,
    answers,
    expect_nothing_held,
    run_at_random,
    speculating,
    use_drafter,
)
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

REQUESTED = [
    Asked(
        tuple(random_prompt(5 + 7 * number, number)),
        SamplingParams(
            max_tokens=6 + 5 * (number % 4), temperature=1.0, seed=number, ignore_eos=number % 2 == 0
        ),
    )
    for number in range(8)
]


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("num_steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_next"])
def test_no_page_or_record_leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_steps: int, caches: bool
) -> None:
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 2)
    engine = speculating(
        EngineConfig(
            model=str(write_tiny_model(tmp_path, EXAMPLES[family])),
            accelerator="none",
            cpu_threads=1,
            page_size=4,
            max_total_tokens=128,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            enable_prefix_caching=caches,
        )
    )
    records = all_records(engine)
    assert len(records) == 4 + 4 * 8
    expected = [answers(engine, [one])[0] for one in REQUESTED]
    known = {one[:2]: answer.tokens for one, answer in zip(REQUESTED, expected, strict=True)}
    use_drafter(engine, ScriptedDrafter(known, 0.4))
    run_at_random(engine, REQUESTED, expected, num_steps)
    assert engine.speculator is not None
    assert engine.speculator.counts.num_accepted_tokens > num_steps / 4
    expect_nothing_held(engine, records)
    engine.close()
