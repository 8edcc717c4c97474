"""Times llama_decode of llama.cpp or of its fork. Runs alone, by any interpreter that has the library's Python package.

    python llama_worker.py '{"library": "llama.cpp", "model": "m.gguf", "prompt": [1, 2], "new_tokens": 32,
                             "repeats": 3, "threads": 2}'

`library` is llama.cpp (llama-cpp-python) or ik_llama.cpp (ik-llama-cpp-python; IK_LLAMA_CPP_LIB_PATH names another
libllama.so for it). Optional switches, true by default: flash_attention, repack, llama.cpp's mmap, the fork's
fused_moe. "depth" tokens of context are read once and kept before the prompt. Prints a line of JSON once loaded
({"load_s", "version", "system"}), then one per repeat ({"prefill_s", "decode_s"}) after a warm-up. As in llama-bench,
decoding takes the next token from a list and samples nothing: here the prompt's own tokens once more.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

_ERROR: Final = 4
"""ggml's log level."""
_CHUNK: Final = 1
_CONTEXT: Final = 2
"""Sequences that a context is made in; what is measured is sequence 0."""


class LlamaCpp:
    """llama.cpp by llama-cpp-python."""

    package = "llama-cpp-python"

    def __init__(self) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        """The library's functions and structs by their names in C."""
        self.version = llama_cpp.__version__
        self._callback = llama_cpp.llama_log_callback(self._on_log)  # the library keeps only the pointer
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_log(self, level: int, text: bytes, user_data: int | None) -> None:
        if level == _ERROR:
            sys.stderr.write(text.decode(errors="replace"))

    def load(self, task: dict[str, Any]) -> Any:
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        self._set_loading(params, task)
        return self.api.llama_model_load_from_file(task["model"].encode(), params)

    def context(self, model: Any, task: dict[str, Any]) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx = task.get("depth", 0) + len(task["prompt"]) + task["new_tokens"] + 64
        params.n_batch = params.n_ubatch = max(32, len(task["prompt"]))
        params.n_threads = params.n_threads_batch = task["threads"]
        self._set_computing(params, task)
        context = self.api.llama_init_from_model(model, params)
        if context:
            self._check(context, params, task)
        return context

    def clear(self, context: Any, depth: int) -> None:
        """Empty the KV cache, but for the `depth` tokens of context that `fill` has put there."""
        memory = self.api.llama_get_memory(context)
        if depth == 0:
            self.api.llama_memory_clear(memory, True)
            return
        self.api.llama_memory_seq_rm(memory, 0, -1, -1)
        self.api.llama_memory_seq_cp(memory, _CONTEXT, 0, -1, -1)

    def fill(self, context: Any, tokens: list[int], depth: int) -> None:
        """Read `depth` tokens, those given again and again, into a sequence of their own.

        A chunk is read as another sequence at its positions and then joined to it, so that it sees itself alone: what a
        later token costs depends on how many there are, and chunks that see all before them take minutes.
        """
        memory = self.api.llama_get_memory(context)
        for begin in range(0, depth, len(tokens)):
            chunk = tokens[: depth - begin]
            batch = self.api.llama_batch_init(len(chunk), 0, 1)
            batch.n_tokens = len(chunk)
            for index, token in enumerate(chunk):
                batch.token[index], batch.pos[index] = token, begin + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, _CHUNK
                batch.logits[index] = index == len(chunk) - 1
            _check_code(self.api.llama_decode(context, batch))
            self.api.llama_batch_free(batch)
            self.api.llama_memory_seq_cp(memory, _CHUNK, _CONTEXT, -1, -1)
            self.api.llama_memory_seq_rm(memory, _CHUNK, -1, -1)
        self.api.llama_synchronize(context)

    def batch(self, tokens: Any, position: int) -> Any:
        """A batch of one sequence's next tokens, which the library counts itself."""
        return self.api.llama_batch_get_one(tokens, len(tokens))

    def _set_loading(self, params: Any, task: dict[str, Any]) -> None:
        params.use_extra_bufts = task.get("repack", True)
        mmap = task.get("mmap", True)
        if hasattr(params, "load_mode"):
            params.load_mode = self.api.LLAMA_LOAD_MODE_MMAP if mmap else self.api.LLAMA_LOAD_MODE_NONE
        else:
            params.use_mmap = mmap

    def _set_computing(self, params: Any, task: dict[str, Any]) -> None:
        if task.get("depth", 0):  # one pool of cells for all sequences
            params.n_seq_max, params.kv_unified = _CONTEXT + 1, True
        params.flash_attn_type = 1 if task.get("flash_attention", True) else 0
        params.no_perf = True

    def _check(self, context: Any, params: Any, task: dict[str, Any]) -> None:
        """Nothing: the package comes with the library for which it was written."""


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp by ik-llama-cpp-python, which has the layouts of its structs and not all of its functions."""

    package = "ik-llama-cpp-python"

    def __init__(self) -> None:
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api as api

        self.api, self.version, self.log = api, ik_llama_cpp.__version__, ""
        pointer, library = ctypes.c_void_p, api._lib
        of_batch = [api.llama_token_p, ctypes.c_int32, api.llama_pos, api.llama_seq_id]
        for name, result, arguments in (
            ("llama_print_system_info", ctypes.c_char_p, []),
            ("llama_synchronize", None, [pointer]),
            ("llama_n_threads", ctypes.c_uint32, [pointer]),
            ("llama_batch_get_one", api.llama_batch, of_batch),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(api, name, function)
        api.llama_model_free = api.llama_free_model
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)
        self._callback = prototype(self._on_log)
        library.llama_log_set(self._callback, None)

    def _on_log(self, level: int, text: bytes, user_data: int | None) -> None:
        self.log += text.decode(errors="replace")
        super()._on_log(level, text, user_data)

    def clear(self, context: Any, depth: int) -> None:
        self.api.llama_kv_cache_clear(context)

    def fill(self, context: Any, tokens: list[int], depth: int) -> None:
        if depth > 0:
            raise RuntimeError("its package has no functions that keep a context for the next prompt")

    def batch(self, tokens: Any, position: int) -> Any:
        return self.api.llama_batch_get_one(tokens, len(tokens), position, 0)

    def _set_loading(self, params: Any, task: dict[str, Any]) -> None:
        params.repack_tensors = task.get("repack", True)  # -rtr, which reads the file instead of mapping it
        params.use_mmap = not params.repack_tensors

    def _set_computing(self, params: Any, task: dict[str, Any]) -> None:
        params.flash_attn = task.get("flash_attention", True)
        params.fused_moe_up_gate = task.get("fused_moe", True)

    def _check(self, context: Any, params: Any, task: dict[str, Any]) -> None:
        """RuntimeError unless the library does as asked. A library of another layout, or a format that it does not
        repack, would measure something else.
        """
        names = ("n_batch", "n_ubatch", "n_threads", "flash_attn")
        wanted = {name: int(getattr(params, name)) for name in names}
        wanted |= {"fused_moe": int(params.fused_moe_up_gate), "repacked": int(task.get("repack", True))}
        check_settings(wanted, settings_in(self.log) | {"n_threads": self.api.llama_n_threads(context)})


def settings_in(log: str) -> dict[str, int]:
    """Whole numbers that ik_llama.cpp logs by name as it makes a context, and whether it repacked tensors."""
    found = re.findall(r"^llama_init_from_model: (\w+) +=\s*(\d+)$", log, re.MULTILINE)
    repacked = re.search(r"Repacked [1-9]\d* tensors", log) is not None
    return {name: int(value) for name, value in found} | {"repacked": int(repacked)}


def check_settings(wanted: Mapping[str, int], reported: Mapping[str, int]) -> None:
    """RuntimeError unless the library reports what it was asked for."""
    for name, value in wanted.items():
        if reported.get(name) != value:
            raise RuntimeError(
                f"ik_llama.cpp was asked for {name} = {value} and reports {reported.get(name)}: it does not repack "
                "this format, or its structs differ from this ik-llama-cpp-python's; build both from one source"
            )


LIBRARIES: Final = {"llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlamaCpp}


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    library = LIBRARIES[task["library"]]
    try:
        lib = library()
    except (ImportError, OSError) as error:
        print(json.dumps({"error": f"{library.package} cannot be imported: {error}"}))
        return 3
    lib.api.llama_backend_init()
    begun = time.perf_counter()
    model = lib.load(task)
    context = lib.context(model, task) if model else None
    if not context:
        what = "no context could be made" if model else f"the model {task['model']} could not be loaded"
        print(json.dumps({"error": what}))
        return 4
    loaded = {
        "load_s": time.perf_counter() - begun,
        "version": lib.version,
        "system": lib.api.llama_print_system_info().decode(),
    }
    print(json.dumps(loaded), flush=True)
    vocab_size = lib.api.llama_vocab_n_tokens(lib.api.llama_model_get_vocab(model))
    prompt = [token % vocab_size for token in task["prompt"]]
    depth = task.get("depth", 0)
    lib.fill(context, prompt, depth)
    for turn in range(task["repeats"] + 1):
        prefill_s, decode_s = _measure(lib, context, prompt, task["new_tokens"], depth)
        # The first warms the caches and the threads.
        if turn > 0:
            print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s}), flush=True)
    lib.api.llama_free(context)
    lib.api.llama_model_free(model)
    return 0


def _measure(
    lib: LlamaCpp, context: Any, prompt: list[int], new_tokens: int, depth: int
) -> tuple[float, float]:
    """Seconds for the prompt in one batch, and for `new_tokens` one-token steps after it."""
    lib.clear(context, depth)
    begun = time.perf_counter()
    _decode(lib, context, prompt, depth)
    prefilled = time.perf_counter()
    for index in range(new_tokens):
        _decode(lib, context, [prompt[index % len(prompt)]], depth + len(prompt) + index)
    return prefilled - begun, time.perf_counter() - prefilled


def _decode(lib: LlamaCpp, context: Any, tokens: list[int], position: int) -> None:
    array = (lib.api.llama_token * len(tokens))(*tokens)
    _check_code(lib.api.llama_decode(context, lib.batch(array, position)))
    lib.api.llama_synchronize(context)


def _check_code(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}")


if __name__ == "__main__":
    sys.exit(main())
