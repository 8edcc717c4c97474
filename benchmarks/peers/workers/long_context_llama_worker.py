"""Times llama.cpp's steps at a long context. Stand-alone; needs an interpreter that has llama-cpp-python.

    python long_context_llama_worker.py '{"model": "m.gguf", "kv": "q8_0", "threads": 2, "context": 33000}'

Prints {"ready": version} once loaded; the orders are those of long_context_worker.py. A chunk is decoded as a sequence
of its own that begins at the chunk's position, and its cells are then given to the long one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from llama_worker import _load, quiet_llama_cpp

_CHUNK = 512
_TYPES = {"f32": "GGML_TYPE_F32", "f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0"}


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    lib = quiet_llama_cpp()
    if lib is None:
        return 3
    lib.llama_backend_init()
    model = _load(lib, task)
    context = _context(lib, model, task) if model else None
    if not context:
        print(json.dumps({"error": f"llama.cpp could not load {task['model']}"}))
        return 4
    worker = Worker(lib, model, context, task["context"])
    print(json.dumps({"ready": lib.__version__}), flush=True)
    for line in sys.stdin:
        (order, count), *_ = json.loads(line).items()
        begun = time.perf_counter()
        getattr(worker, order)(count)
        seconds = time.perf_counter() - begun
        worker.forget()
        print(json.dumps({"seconds": seconds}), flush=True)
    return 0


def _context(lib: Any, model: Any, task: dict[str, Any]) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = task["context"]
    params.n_batch = params.n_ubatch = _CHUNK
    params.n_seq_max = 2
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = task["threads"]
    params.flash_attn_type = 1
    params.type_k = params.type_v = getattr(lib, _TYPES[task["kv"]])
    params.no_perf = True
    return lib.llama_init_from_model(model, params)


class Worker:
    """A context with a long sequence 0, and a sequence 1 for chunks."""

    def __init__(self, lib: Any, model: Any, context: Any, num_cells: int) -> None:
        self._lib, self._context = lib, context
        self._memory = lib.llama_get_memory(context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._batch = lib.llama_batch_init(_CHUNK, 0, 1)
        self._length, self._num_cells = 0, num_cells

    def fill(self, length: int) -> None:
        for begin in range(self._length, length, _CHUNK):
            end = min(length, begin + _CHUNK)
            self._decode(begin, end, 1)
            self._lib.llama_memory_seq_cp(self._memory, 1, 0, -1, -1)
            self._lib.llama_memory_seq_rm(self._memory, 1, -1, -1)
        self._length = length

    def decode(self, count: int) -> None:
        for position in range(self._length, self._length + count):
            self._decode(position, position + 1, 0)

    def prefill(self, count: int) -> None:
        for begin in range(self._length, self._length + count, _CHUNK):
            self._decode(begin, min(self._length + count, begin + _CHUNK), 0)

    def forget(self) -> None:
        """Drops the tokens after the context."""
        self._lib.llama_memory_seq_rm(self._memory, 0, self._length, -1)

    def _decode(self, begin: int, end: int, sequence: int) -> None:
        batch = self._batch
        batch.n_tokens = end - begin
        for index, position in enumerate(range(begin, end)):
            batch.token[index] = (position * 7919) % self._vocab
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = position == end - 1
        code = self._lib.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        self._lib.llama_synchronize(self._context)


if __name__ == "__main__":
    sys.exit(main())
