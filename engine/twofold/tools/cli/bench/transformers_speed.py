"""Times Hugging Face transformers' `generate` on the same model, prompt and number of tokens.

transformers runs in its fastest configuration: a short trial on this machine, under its current load, chooses between
the checkpoint's dtype and float32, and between torch's default number of threads and one.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any, Final

from twofold.tools.cli.bench.speed import Speed

_TRIAL_TOKENS: Final = 8


class TransformersBench:
    """The model as transformers loads it, on the CPU.

    Args:
        try_float32: also load it as float32, which many CPUs compute faster but which takes twice the memory.
    """

    def __init__(self, directory: Path, *, try_float32: bool) -> None:
        # Imported as Any: parts of its logging and model API carry no types.
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._version = transformers.__version__
        self._models: list[Any] = []
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        texts, pictures = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        kind = texts if type(config) in texts._model_mapping else pictures
        for dtype in ("auto", "float32") if try_float32 else ("auto",):
            loaded = kind.from_pretrained(directory, dtype=dtype, local_files_only=True)
            self._models.append(loaded.eval())
        self._model = self._models[0]
        self._trials: dict[str, float] = {}

    def choose_fastest(self, prompt: list[int]) -> None:
        """Try every configuration on a few tokens and keep the one that decodes fastest."""
        import torch

        torch_threads = torch.get_num_threads()
        best_s = float("inf")
        best_threads = torch_threads
        for model in self._models:
            for num_threads in sorted({torch_threads, 1}):
                torch.set_num_threads(num_threads)
                self._model, former = model, self._model
                self.answer_once(prompt, 2)
                decode_s = self.answer_once(prompt, _TRIAL_TOKENS).decode_s
                rate = (_TRIAL_TOKENS - 1) / decode_s
                self._trials[f"{_dtype_name(model)}, {num_threads} threads"] = rate
                if decode_s < best_s:
                    best_s, best_threads = decode_s, num_threads
                else:
                    self._model = former
        self._models.clear()
        torch.set_num_threads(best_threads)

    def describe(self) -> dict[str, Any]:
        """The chosen configuration, and the trial's result for each (decode tokens per second)."""
        import torch

        return {
            "version": self._version,
            "dtype": _dtype_name(self._model),
            "threads": torch.get_num_threads(),
            "trial_decode_tokens_per_s": self._trials,
        }

    def answer_once(self, prompt: list[int], new_tokens: int) -> Speed:
        """Greedy, exactly `new_tokens` tokens; a stopping criterion that never stops records each token's time."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class NoteTime(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        ids = torch.tensor([prompt])
        begun = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                stopping_criteria=StoppingCriteriaList([NoteTime()]),
            )
        return Speed(len(prompt), new_tokens, times[0] - begun, times[-1] - times[0])


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
