"""Conversations over HTTP: the state and token caches change no text, in batches and when requests are preempted
and recomputed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.tiny_models.writing import TinyModel, write_tiny_model

NUM_TALKS, NUM_TURNS, ANSWER = 4, 2, 48


def talk(url: str, number: int) -> tuple[list[str], int]:
    """The answers of one conversation, and how many tokens were found."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief. " * 4}]
    reply: list[str] = []
    found = 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Conversation {number}, turn {turn}: and then?"})
        body: dict[str, Any] = {
            "messages": messages,
            "max_tokens": ANSWER,
            "ignore_eos": True,
            "seed": number,
        }
        answer = HTTP.post(f"{url}/v1/chat/completions", json=body).json()
        reply.append(answer["choices"][0]["message"]["content"])
        found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": reply[-1]})
    return reply, found


def all_talks(model: Path, **options: Any) -> tuple[list[list[str]], int, int]:
    """Runs all conversations at once; returns their answers, the cache-hit tokens and the number of preemptions."""
    engine = Engine.load(
        EngineConfig(model=str(model), accelerator="none", cpu_threads=1, page_size=16, **options)
    )
    returned = 0
    scheduler = engine._scheduler
    preempt = scheduler._preempt

    def count(*arguments: Any) -> Any:
        nonlocal returned
        returned += 1
        return preempt(*arguments)

    scheduler._preempt = count  # type: ignore[method-assign]
    engine.start()
    with serving(create_app(engine, ServerConfig())) as url, ThreadPoolExecutor(NUM_TALKS) as clients:
        talks = list(clients.map(lambda number: talk(url, number), range(NUM_TALKS)))
    engine.close()
    return [reply for reply, _ in talks], sum(found for _, found in talks), returned


def test_no_text_changes_by_caches_batches_and_preemption(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", TinyModel(max_position_embeddings=2048))
    alone, found, _ = all_talks(model, enable_prefix_caching=False, max_num_seqs=1, max_total_tokens=4096)
    assert found == 0
    cached, found, returned = all_talks(model, max_num_seqs=4, max_total_tokens=384)
    assert cached == alone
    assert found > 0
    assert returned > 0
