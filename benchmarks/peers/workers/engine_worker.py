"""Times how long Twofold takes to load a model, then its decode of several sequences at once.

    python engine_worker.py '{"model": "m.gguf", "threads": 2, "batches": [1, 16], "prompt_tokens": 64,
                              "new_tokens": 32, "seed": 0}'

Prints {"load_s"}, then a line {"batch", "prefill_s", "decode_s", "python_s"} for each number of sequences. Every
sequence has a prompt of its own; steps are whole steps of the engine, picking the tokens included. python_s is what of
decode_s was neither native work nor picking tokens. With "hold": true it answers a prompt, says {"ready": true} when
all mapped weights are in memory, and ends when its input does.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twofold.api.types import Chunk
    from twofold.engine import Engine

_WARM_STEPS = 2
_MOST_HELD_BACK = 16
"""Tokens of an answer whose text may not have come yet, because they are half a character."""


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        from twofold.api.config import EngineConfig
        from twofold.api.errors import TwofoldError
        from twofold.engine import Engine
    except ImportError as error:
        print(json.dumps({"error": f"twofold cannot be imported: {error}"}))
        return 3
    limits: dict[str, Any] = {}
    if task.get("batches"):
        most = max(task["batches"])
        length = task["prompt_tokens"] + _room(task, most)
        limits = {"max_num_seqs": most, "max_model_len": length, "max_total_tokens": most * (length + 16)}
    config = EngineConfig(
        model=task["model"],
        accelerator="none",
        cpu_threads=task["threads"],
        enable_prefix_caching=False,
        **limits,
    )
    begun = time.perf_counter()
    try:
        engine = Engine.load(config)
    except TwofoldError as error:
        print(json.dumps({"error": str(error)}))
        return 4
    print(json.dumps({"load_s": time.perf_counter() - begun}), flush=True)
    for batch in task.get("batches", ()):
        _measure(engine, task | {"new_tokens": 2, "prompt_tokens": 4}, batch)
        print(json.dumps({"batch": batch, **_measure(engine, task, batch)}), flush=True)
    if task.get("hold"):
        _hold(engine)
    engine.close()
    return 0


def _hold(engine: Engine) -> None:
    from twofold.api.types import SamplingParams

    engine.generate(list(range(5, 21)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    while (weights := engine.mapped_weights) and weights.resident_bytes < weights.mapped_bytes:
        time.sleep(0.05)
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.read()


def _room(task: dict[str, Any], batch: int) -> int:
    """Token limit of an answer: the first sequence must not finish before the last has been timed."""
    prompts: int = batch * task["prompt_tokens"]
    return prompts + int(task["new_tokens"]) + _WARM_STEPS + _MOST_HELD_BACK


def _measure(engine: Engine, task: dict[str, Any], batch: int) -> dict[str, float]:
    """Seconds for all prompts, and for `new_tokens` steps in which every sequence gets one token."""
    from twofold.api.types import GenerationRequest, SamplingParams
    from twofold.blocks import ops

    draw = random.Random(task["seed"])  # noqa: S311
    counts = [0] * batch

    def counter(index: int) -> Any:
        def on_chunk(chunk: Chunk) -> None:
            counts[index] += len(chunk.token_ids)

        return on_chunk

    sampling = SamplingParams(temperature=0.0, max_tokens=_room(task, batch), ignore_eos=True)
    names = [f"{batch}-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        prompt = tuple(draw.randrange(engine.vocab_size) for _ in range(task["prompt_tokens"]))
        engine.submit(GenerationRequest(prompt, sampling, counter(index), name))
    begun = time.perf_counter()
    while not all(counts):
        engine.step()
    prefill_s = time.perf_counter() - begun
    for _ in range(_WARM_STEPS):
        engine.step()
    before, native_s = engine.stats(), sum(ops.work_times().values()) + engine.runner.sampling_s
    begun = time.perf_counter()
    for _ in range(task["new_tokens"]):
        engine.step()
    decode_s = time.perf_counter() - begun
    native_s = sum(ops.work_times().values()) + engine.runner.sampling_s - native_s
    after = engine.stats()
    num_steps = after.num_steps - before.num_steps
    if not before.num_running == after.num_running == batch or num_steps != task["new_tokens"]:
        raise RuntimeError(f"not all {batch} sequences took part in every step: {before}, then {after}")
    for name in names:
        engine.cancel(name)
    engine.step()
    return {"prefill_s": prefill_s, "decode_s": decode_s, "python_s": decode_s - native_s}


if __name__ == "__main__":
    sys.exit(main())
