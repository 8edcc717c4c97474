"""Times llama.cpp's llama_decode through llama-cpp-python's low-level API. Runs alone, by any interpreter that has it.

    python llama_worker.py '{"model": "m.gguf", "prompt": [1, 2], "new_tokens": 32, "repeats": 3, "threads": 2}'

Optional: flash_attention, mmap, repack (all true by default). Prints a line of JSON once loaded
({"load_s", "version", "system"}), then one per repeat ({"prefill_s", "decode_s"}) after a warm-up. As in llama-bench,
decoding takes the next token from a list and samples nothing: here the prompt's own tokens once more.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        import llama_cpp as lib
    except ImportError as error:
        print(json.dumps({"error": f"llama-cpp-python cannot be imported: {error}"}))
        return 3

    @lib.llama_log_callback
    def log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        if level == 4:  # errors
            sys.stderr.write(text.decode(errors="replace"))

    lib.llama_log_set(log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    begun = time.perf_counter()
    model = _load(lib, task)
    context = _context(lib, model, task) if model else None
    if not context:
        what = "no context could be made" if model else f"the model {task['model']} could not be loaded"
        print(json.dumps({"error": what}))
        return 4
    loaded = {
        "load_s": time.perf_counter() - begun,
        "version": lib.__version__,
        "system": lib.llama_print_system_info().decode(),
    }
    print(json.dumps(loaded), flush=True)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    prompt = [token % vocab_size for token in task["prompt"]]
    for turn in range(task["repeats"] + 1):
        prefill_s, decode_s = _measure(lib, context, prompt, task["new_tokens"])
        # The first warms the caches and the threads.
        if turn > 0:
            print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s}), flush=True)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return 0


def _load(lib: Any, task: dict[str, Any]) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = task.get("repack", True)
    mmap = task.get("mmap", True)
    if hasattr(params, "load_mode"):
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if mmap else lib.LLAMA_LOAD_MODE_NONE
    else:
        params.use_mmap = mmap
    return lib.llama_model_load_from_file(task["model"].encode(), params)


def _context(lib: Any, model: Any, task: dict[str, Any]) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = len(task["prompt"]) + task["new_tokens"] + 64
    params.n_batch = params.n_ubatch = max(32, len(task["prompt"]))
    params.n_threads = params.n_threads_batch = task["threads"]
    params.flash_attn_type = 1 if task.get("flash_attention", True) else 0
    params.no_perf = True
    return lib.llama_init_from_model(model, params)


def _measure(lib: Any, context: Any, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds for the prompt in one batch, and for `new_tokens` one-token steps after it."""
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    begun = time.perf_counter()
    _decode(lib, context, prompt)
    prefilled = time.perf_counter()
    for index in range(new_tokens):
        _decode(lib, context, [prompt[index % len(prompt)]])
    return prefilled - begun, time.perf_counter() - prefilled


def _decode(lib: Any, context: Any, tokens: list[int]) -> None:
    array = (lib.llama_token * len(tokens))(*tokens)
    code = lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens)))
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}")
    lib.llama_synchronize(context)


if __name__ == "__main__":
    sys.exit(main())
