"""Times transformers' forward pass on a bfloat16 checkpoint directory on the CPU. Runs alone, in a process of its own.

    python transformers_worker.py '{"model": "dir", "prompt": [1, 2], "new_tokens": 32, "repeats": 3, "threads": 2}'

Prints JSON lines as llama_worker.py does. It is given its best chance: every way of computing experts that this version
of transformers has is tried first, and prompt and single tokens each use the way that was fastest for them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

_WAYS: Final = ("eager", "grouped_mm", "batched_mm")
_BATCHED_PROMPT_TOKENS: Final = 16
"""batched_mm copies an expert's weights for every token: longer prompts would need more memory than there is."""


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        import torch
        import transformers
    except ImportError as error:
        print(json.dumps({"error": f"transformers cannot be imported: {error}"}))
        return 3
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(task["threads"])
    begun = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16, local_files_only=True
    ).eval()
    print(
        json.dumps({"load_s": time.perf_counter() - begun, "version": transformers.__version__}), flush=True
    )
    timer = Timer(model, task["prompt"], task["new_tokens"])
    timer.choose()
    for _ in range(task["repeats"]):
        prefill_s, decode_s = timer.measure()
        print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s, "ways": timer.ways}), flush=True)
    return 0


class Timer:
    """Times one prompt and the single tokens after it; `ways` is how each computes its experts."""

    def __init__(self, model: Any, prompt: list[int], new_tokens: int) -> None:
        self._model, self._prompt, self._new_tokens = model, prompt, new_tokens
        self.ways = {"prefill": "eager", "decode": "eager"}

    def choose(self) -> None:
        """Try every way on the prompt and on a few tokens; those that fail are left out."""
        if not hasattr(self._model, "set_experts_implementation"):
            self.measure()
            return
        best = {"prefill": float("inf"), "decode": float("inf")}
        chosen = dict(self.ways)
        for way in _WAYS:
            long = len(self._prompt) > _BATCHED_PROMPT_TOKENS
            self.ways = {"prefill": "eager" if way == "batched_mm" and long else way, "decode": way}
            try:
                self.measure(new_tokens=2)
                prefill_s, decode_s = self.measure(new_tokens=min(8, self._new_tokens))
            except (ImportError, RuntimeError, ValueError):
                continue
            for test, took_s in (("prefill", prefill_s), ("decode", decode_s)):
                if took_s < best[test]:
                    best[test], chosen[test] = took_s, self.ways[test]
        self.ways = chosen

    def measure(self, new_tokens: int | None = None) -> tuple[float, float]:
        """Seconds for the prompt, and for `new_tokens` one-token steps after it; nothing is sampled."""
        import torch

        steps = self._new_tokens if new_tokens is None else new_tokens
        with torch.inference_mode():
            self._use("prefill")
            begun = time.perf_counter()
            out = self._model(torch.tensor([self._prompt]), use_cache=True, logits_to_keep=1)
            prefilled = time.perf_counter()
            self._use("decode")
            for index in range(steps):
                token = torch.tensor([[self._prompt[index % len(self._prompt)]]])
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            return prefilled - begun, time.perf_counter() - prefilled

    def _use(self, test: str) -> None:
        if hasattr(self._model, "set_experts_implementation"):
            self._model.set_experts_implementation(self.ways[test])


if __name__ == "__main__":
    sys.exit(main())
