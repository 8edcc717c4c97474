"""Times llama.cpp's decode of several sequences as its llama-batched-bench does, by llama-cpp-python's low-level API.

    python batched_llama_worker.py '{"model": "m.gguf", "batches": [1, 16], "prompt_tokens": 64, "new_tokens": 32,
                                     "threads": 2, "seed": 0}'

Optional: flash_attention, mmap, repack, kv_unified (all but the last true by default). Runs alone, by any interpreter
that has it. Every sequence has a prompt of its own; a step decodes one random token of each, with the logits of all,
and samples nothing. Prints a line {"batch", "prefill_s", "decode_s"} for each number of sequences.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

_MOST_ROWS = 512
"""Tokens of one call while prompts are read: llama-batched-bench's own -ub."""


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    from benchmarks.peers.workers import llama_worker

    lib = llama_worker.quiet_llama_cpp()
    if lib is None:
        return 3
    lib.llama_backend_init()
    model = llama_worker._load(lib, task)
    if not model:
        print(json.dumps({"error": f"llama.cpp could not load {task['model']}"}))
        return 4
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for batch in task["batches"]:
        context = _context(lib, model, task, batch)
        if not context:
            print(json.dumps({"error": f"llama.cpp could not make a context for {batch} sequences"}))
            return 4
        # The first steps warm the caches and the threads.
        _measure(lib, context, task | {"new_tokens": 2, "prompt_tokens": 4}, batch, vocab_size)
        prefill_s, decode_s = _measure(lib, context, task, batch, vocab_size)
        print(json.dumps({"batch": batch, "prefill_s": prefill_s, "decode_s": decode_s}), flush=True)
        lib.llama_free(context)
    lib.llama_model_free(model)
    return 0


def _context(lib: Any, model: Any, task: dict[str, Any], batch: int) -> Any:
    params = lib.llama_context_default_params()
    # A multiple of 256 for each sequence, as llama.cpp pads it to.
    each = -(-(task["prompt_tokens"] + task["new_tokens"]) // 256) * 256
    params.n_ctx = batch * each
    params.n_batch = params.n_ubatch = _MOST_ROWS
    params.n_seq_max = batch
    params.n_threads = params.n_threads_batch = task["threads"]
    params.flash_attn_type = 1 if task.get("flash_attention", True) else 0
    params.kv_unified = task.get("kv_unified", False)
    params.no_perf = True
    return lib.llama_init_from_model(model, params)


def _measure(
    lib: Any, context: Any, task: dict[str, Any], batch: int, vocab_size: int
) -> tuple[float, float]:
    """Seconds for all prompts, and for `new_tokens` decode steps of one token per sequence after them."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    draw = random.Random(task["seed"])  # noqa: S311
    length = task["prompt_tokens"]
    rows = lib.llama_batch_init(_MOST_ROWS, 0, 1)
    try:
        begun = time.perf_counter()
        prompts = [
            (draw.randrange(vocab_size), place, sequence, place == length - 1)
            for sequence in range(batch)
            for place in range(length)
        ]
        for first in range(0, len(prompts), _MOST_ROWS):
            _decode(lib, context, rows, prompts[first : first + _MOST_ROWS])
        prefilled = time.perf_counter()
        for place in range(length, length + task["new_tokens"]):
            step = [(draw.randrange(vocab_size), place, sequence, True) for sequence in range(batch)]
            _decode(lib, context, rows, step)
        return prefilled - begun, time.perf_counter() - prefilled
    finally:
        lib.llama_batch_free(rows)


def _decode(lib: Any, context: Any, rows: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
    """Tokens as (id, place, sequence, whether its logits are wanted)."""
    rows.n_tokens = len(tokens)
    for row, (token, place, sequence, wanted) in enumerate(tokens):
        rows.token[row] = token
        rows.pos[row] = place
        rows.n_seq_id[row] = 1
        rows.seq_id[row][0] = sequence
        rows.logits[row] = wanted
    code = lib.llama_decode(context, rows)
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}")
    lib.llama_synchronize(context)


if __name__ == "__main__":
    sys.exit(main())
