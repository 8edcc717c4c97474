"""Results of transformers for a model directory, in float32 with plain ("eager") attention and experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


def reference(directory: Path, dtype: Any = None, *, multimodal: bool = False) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    listed = type(transformers.AutoConfig.from_pretrained(directory)) in known
    text = transformers.AutoModelForCausalLM
    kind = transformers.AutoModelForImageTextToText if multimodal or not listed else text
    model = kind.from_pretrained(
        directory,
        dtype=dtype or torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        ignore_mismatched_sizes=multimodal,
    )
    return model.eval()


def reference_logits(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def reference_greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    # Set on the model, because generate fills what is None in its argument from there: the end tokens would end it.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.no_grad():
        prompt = torch.tensor([ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens)
    return out[0, len(ids) :].tolist()


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Tiny matrices: a second thread costs more than it gives, many times more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
