"""Times ik_llama.cpp's llama_decode as llama_worker.py does llama.cpp's, by an interpreter with ik-llama-cpp-python.

    python ik_worker.py '{"model": "m.gguf", "prompt": [1, 2], "new_tokens": 32, "repeats": 3, "threads": 2}'

Optional, all true by default: flash_attention (-fa), repack (-rtr, which reads the file instead of mapping it) and
fused_moe (-fmoe). The package gives the layouts of the C structs; IK_LLAMA_CPP_LIB_PATH names another libllama.so for
it. What the library says that it did is held against what it was told: a library of another layout, or a format that
it does not repack, would measure something else.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.peers.workers.llama_worker import time_steps

_ERROR: Final = 4
"""ggml's log level."""


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api as api
    except (ImportError, OSError) as error:
        print(json.dumps({"error": f"ik-llama-cpp-python cannot be imported: {error}"}))
        return 3
    return time_steps(_Library(api, ik_llama_cpp.__version__), task, _load, _context)


class _Library(SimpleNamespace):
    """The fork's functions by the names and signatures that llama.cpp has today, and what it logs."""

    def __init__(self, api: Any, version: str) -> None:
        super().__init__(**{name: getattr(api, name) for name in dir(api) if name.startswith("llama_")})
        self.__version__ = version
        self.log = ""
        self._next_position = 0
        shared = api._lib
        for name, result, arguments in (
            ("llama_print_system_info", ctypes.c_char_p, []),
            ("llama_synchronize", None, [ctypes.c_void_p]),
            ("llama_n_threads", ctypes.c_uint32, [ctypes.c_void_p]),
        ):
            function = getattr(shared, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.llama_model_free = api.llama_free_model
        self.llama_get_memory = lambda context: context
        self._batch_of = shared.llama_batch_get_one
        self._batch_of.restype = api.llama_batch
        self._batch_of.argtypes = [api.llama_token_p, ctypes.c_int32, api.llama_pos, api.llama_seq_id]
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._callback = prototype(self._note)  # the library keeps only the pointer
        shared.llama_log_set(self._callback, None)

    def _note(self, level: int, text: bytes, user_data: int | None) -> None:
        said = text.decode(errors="replace")
        self.log += said
        if level == _ERROR:
            sys.stderr.write(said)

    def llama_memory_clear(self, context: Any, data: bool) -> None:
        self.llama_kv_cache_clear(context)
        self._next_position = 0

    def llama_batch_get_one(self, tokens: Any, num_tokens: int) -> Any:
        begin, self._next_position = self._next_position, self._next_position + num_tokens
        return self._batch_of(tokens, num_tokens, begin, 0)


def _load(lib: _Library, task: dict[str, Any]) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.repack_tensors = task.get("repack", True)
    params.use_mmap = not params.repack_tensors
    return lib.llama_model_load_from_file(task["model"].encode(), params)


def _context(lib: _Library, model: Any, task: dict[str, Any]) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = len(task["prompt"]) + task["new_tokens"] + 64
    params.n_batch = params.n_ubatch = max(32, len(task["prompt"]))
    params.n_threads = params.n_threads_batch = task["threads"]
    params.flash_attn = task.get("flash_attention", True)
    params.fused_moe_up_gate = task.get("fused_moe", True)
    context = lib.llama_init_from_model(model, params)
    if context:
        does = settings_in(lib.log) | {"n_threads": lib.llama_n_threads(context)}
        told = {
            "n_batch": params.n_batch,
            "n_ubatch": params.n_ubatch,
            "flash_attn": int(params.flash_attn),
            "fused_moe": int(params.fused_moe_up_gate),
            "repacked": int(task.get("repack", True)),
            "n_threads": task["threads"],
        }
        check_settings(told, does)
    return context


def settings_in(log: str) -> dict[str, int]:
    """The whole numbers that the library logs by name as it makes a context, and whether it repacked tensors."""
    found = re.findall(r"^llama_init_from_model: (\w+) +=\s*(\d+)$", log, re.MULTILINE)
    repacked = re.search(r"Repacked [1-9]\d* tensors", log) is not None
    return {name: int(value) for name, value in found} | {"repacked": int(repacked)}


def check_settings(told: Mapping[str, int], does: Mapping[str, int]) -> None:
    """RuntimeError unless the library does what it was told."""
    for name, value in told.items():
        if does.get(name) != value:
            raise RuntimeError(
                f"ik_llama.cpp was told {name} = {value} and reports {does.get(name)}: it does not repack this format, "
                "or its structs are laid out otherwise than this ik-llama-cpp-python's; build both from one source"
            )


if __name__ == "__main__":
    sys.exit(main())
