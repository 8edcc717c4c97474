"""Models whose layers keep a record per sequence: the lifetime of records, and tensors that are left out."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.models.model_files import open_model_files

from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, tiny
from tests.tiny_models.writing import write_tiny_model


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_parts_that_are_not_run_are_ignored_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    path = write_tiny_model(tmp_path, EXAMPLES[family])
    with caplog.at_level(logging.INFO, logger="twofold"):
        open_model_files(path)
    reported = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    parts = ["multi-token prediction is not run", "vision tower is read with the first picture"]
    expected = parts[: 1 + (family == "qwen3_5_moe")]
    assert [message.split(": ")[1].split(";")[0] for message in reported] == expected
    assert " tensors mtp.*" in reported[0]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_preempted_and_cancelled_requests_free_their_records(tmp_path: Path, family: str) -> None:
    """Room for fewer pages and records than the requests ask for: the answers are those that each has alone."""
    directory = write_tiny_model(tmp_path, EXAMPLES[family])

    def answers(alone: bool) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        engine = Engine.load(
            EngineConfig(
                model=str(directory),
                accelerator="none",
                cpu_threads=1,
                page_size=4,
                max_num_batched_tokens=11,
                max_total_tokens=256 if alone else 80,
                max_num_seqs=1 if alone else 3,
                kv_cache_dtype="float32",
            )
        )
        whole = engine.stats()
        assert whole.num_records == whole.num_free_records == (1 if alone else 3)
        for number in range(6):
            tokens = found[f"r{number}"] = []
            sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            request = GenerationRequest(
                tuple(random_prompt(9 + 3 * number, number)),
                sampling,
                lambda chunk, tokens=tokens: tokens.extend(chunk.token_ids),
                f"r{number}",
            )
            engine.submit(request)
        preempted, waited = 0, engine.stats().num_waiting
        while engine.step():
            if len(found["r1"]) >= 5:
                engine.cancel("r1")
            now = engine.stats()
            assert now.num_records - now.num_free_records == now.num_running
            preempted += now.num_waiting > waited
            waited = now.num_waiting
        after = engine.stats()
        assert (after.num_free_records, after.num_free_pages) == (whole.num_records, whole.num_pages)
        engine.close()
        assert alone or preempted > 0
        return found

    ours, expected = answers(alone=False), answers(alone=True)
    assert ours.pop("r1")[:5] == expected.pop("r1")[:5]
    assert ours == expected
    assert all(len(tokens) == 24 for tokens in ours.values())


def test_an_older_gguf_file_gives_the_bits_of_a_newer_one(tmp_path: Path) -> None:
    """Early converters wrote queries, keys, values and z by key head in one tensor."""
    prompt, logits = random_prompt(20), []
    newer = tiny("qwen3_next")
    for model in (newer, replace(newer, row=replace(newer.row, gguf_stored=("ssm_in", "ssm_ba")))):
        runner = load(write_tiny_gguf(tmp_path / f"{len(logits)}.gguf", model))
        logits.append(runner.logits(runner.prefill(prompt)[1]))
    np.testing.assert_array_equal(*logits)
