"""The prefix cache on a device: pages of its memory shared and copied, records kept in the host's and brought back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.device.runner import DeviceRunner
from twofold.engine import Engine
from twofold.engine.prefix import cache as prefix_cache

from tests.device.runner_runs import found_device
from tests.engine.model_runs import random_prompt
from tests.tiny_models.kernel_sizes import MODELS
from tests.tiny_models.writing import write_tiny_model

CHUNK = 24
FIRST = tuple(random_prompt(CHUNK + 5, 1))
SECOND = (*FIRST[:CHUNK], *random_prompt(9, 2))
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)


def answers(engine: Engine, *prompts: tuple[int, ...]) -> list[list[Chunk]]:
    found: list[list[Chunk]] = [[] for _ in prompts]
    for number, (prompt, chunks) in enumerate(zip(prompts, found, strict=True)):
        engine.submit(GenerationRequest(prompt, SAMPLING, chunks.append, f"r{number}"))
    while engine.step():
        pass
    assert all(chunks[-1].error is None for chunks in found)
    return found


def printed(chunks: list[Chunk]) -> list[object]:
    return [(chunk.token_ids, chunk.logprobs) for chunk in chunks]


def cached(chunks: list[Chunk]) -> int:
    usage = chunks[-1].usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize(
    "model",
    [
        "deepseek_v3",
        "qwen3_next",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("gpt_oss", "lfm2_moe")),
    ],
)
def test_a_shared_begin_changes_no_bit_of_an_answer(
    simt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """With every expert in a slot, and the prompt computed in the chunks that the cache leaves: a device adds up a
    prompt of other chunks in another order."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", CHUNK)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 2)
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path, MODELS[model])),
        accelerator="cuda",
        gpu_experts_ratio=1.0,
        cpu_threads=1,
        page_size=8,
        max_num_batched_tokens=CHUNK,
        max_total_tokens=256,
        max_num_seqs=2,
        max_itl_ms=600_000.0,
    )
    with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
        plain = Engine.load(replace(config, enable_prefix_caching=False))
    first, second = answers(plain, FIRST)[0], answers(plain, SECOND)[0]
    turn = (*FIRST, *(token for chunk in first for token in chunk.token_ids), 3)
    plain.close()
    with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
        engine = Engine.load(config)
    assert isinstance(engine.runner, DeviceRunner)
    assert printed(answers(engine, FIRST)[0]) == printed(first)
    after = answers(engine, SECOND)[0]
    assert (cached(after), printed(after)) == (CHUNK, printed(second))
    # Where the first ended, five tokens into a page: copied, with the record of that place.
    whole = answers(engine, turn)[0]
    assert cached(whole) == len(turn) - 2
    assert engine.stats().num_free_pages == engine.stats().num_pages
    # The same again, in pages and records of another order.
    memory = engine.runner.memory
    assert memory.read_page(0) != memory.read_page(1)
    for page in range(3):
        memory.write_page(page + 9, memory.read_page(page))
        assert memory.read_page(page + 9) == memory.read_page(page)
    if engine.stats().num_records:
        snapshot = memory.read_record(engine.stats().num_records)
        memory.write_record(0, snapshot)
        assert memory.read_record(0) == snapshot
    with pytest.raises(ValueError, match="were expected"):
        memory.write_page(0, b"short")
    engine.close()
