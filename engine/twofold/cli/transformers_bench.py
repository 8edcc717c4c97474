"""Times Hugging Face transformers' `generate` on the same model, the same prompt and the same number of
tokens.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from twofold.cli.speed import Speed


class TransformersBench:
    """The model as transformers loads it, on the CPU, in the checkpoint's own dtype and with torch's own
    threads.
    """

    def __init__(self, directory: Path) -> None:
        # Imported as Any: parts of its logging and model API carry no types.
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._version = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", local_files_only=True
        )
        self._model.eval()

    def describe(self) -> dict[str, Any]:
        import torch

        return {
            "version": self._version,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def answer_once(self, prompt: list[int], new_tokens: int) -> Speed:
        """Greedy, exactly `new_tokens` long; a stopping criterion that never stops notes when each token
        came.
        """
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class NoteTime(StoppingCriteria):  # type: ignore[misc, unused-ignore]
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
