"""Results of transformers for a model directory, in float32 with plain ("eager") attention and experts; a tiny model
compared with them and with itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers

from tests.engine.model_runs import Runner, load, random_prompt
from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPT: Final = random_prompt(40)
_NUM_GREEDY: Final = 64
_MOST_ROUNDED: Final = 20
"""Largest error against float64 where transformers' own exceeds the bound, in units of that bound."""


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


def reference_of(model: TinyModel, directory: Path) -> Any:
    """transformers' model of a directory that `write_tiny_model` has written."""
    return reference(directory, multimodal=isinstance(model, TinyFamily) and model.nested)


@contextmanager
def lower_entries_first() -> Iterator[None]:
    """Among equal values, `topk` has the lower entry first; torch leaves the order open. An indexer's scores are 0
    wherever all of its heads' products are below 0, and A.X-K2's experts of other groups have a score of 0."""

    def topk(values: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> Any:
        best = torch.sort(values, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((best[0].narrow(dim, 0, k), best[1].narrow(dim, 0, k)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        patch.setattr(torch, "topk", topk)
        yield


def reference_logits(model: Any, ids: list[int]) -> Any:
    with torch.no_grad(), lower_entries_first():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def logits_in_float64(model: Any, ids: list[int]) -> Any:
    """Logits f64 of `model`, which is in float64 from then on; here its casts to float32 are casts to float64, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        return reference_logits(model.double(), ids)


def reference_greedy(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    # Set on the model, because generate fills what is None in its argument from there: the end tokens would end it.
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    with torch.no_grad(), lower_entries_first():
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


def write_gguf(path: Path, model: TinyModel, **how: Any) -> Path:
    return write_tiny_gguf(path, replace(model, expert_layout="separate").twin, **how)


def equals_transformers_and_itself(model: TinyModel, root: Path) -> str:
    """Compare a model's logits, 64 greedy tokens, chunks, batches and GGUF file. Returns both sides' errors against
    float64 where that decided; else "".
    """
    directory = write_tiny_model(root / "hf", model)
    known = model if isinstance(model, TinyFamily) and model.row.has_small_vision else model.twin
    theirs = reference_of(known, directory if known is model else write_tiny_model(root / "known", known))
    ours = load(directory, num_sequences=9)
    expected = reference_logits(theirs, PROMPT)
    _, hidden = ours.prefill(PROMPT)
    logits = ours.logits(hidden)
    difference = float(np.abs(logits - expected).max())
    # Relative to logits beyond 16: one of 30 has been seen 1.3e-4 away on one CPU and 1.0e-4 on another.
    bound = 1e-4 * max(1.0, float(np.abs(expected).max()) / 16)
    decided = ""
    if difference >= bound:  # norms may magnify what transformers rounds in float32: float64 decides
        rounded, expected = expected, logits_in_float64(theirs, PROMPT)
        # Never further from float64 than transformers is, and never further than any rounding has been seen to go.
        bound = max(bound, min(float(np.abs(rounded - expected).max()), _MOST_ROUNDED * bound))
        difference = float(np.abs(logits - expected).max())
        decided = f"{difference:.1e} here, {float(np.abs(rounded - expected).max()):.1e} in transformers"
    assert difference <= bound, decided
    assert np.abs(expected).max() > 1.0, "logits near zero would agree whatever the model does"
    for prompt in (PROMPT, random_prompt(40, 1), random_prompt(40, 2)):
        answer, lead = ours.greedy(prompt, _NUM_GREEDY)
        if lead > 2 * difference:  # else two tokens are equal within rounding, and the prompt decides nothing
            break
    assert lead > 2 * difference, "three prompts with a tie within rounding; draw another seed"
    assert answer == reference_greedy(theirs, prompt, _NUM_GREEDY)

    ours = load(directory, num_sequences=9)
    for chunks in ((1,) * 40, (7, 1, 13, 2)):
        np.testing.assert_array_equal(ours.prefill(PROMPT, chunks)[1], hidden)
    _batch_of_8_is_its_sequences_alone(
        load(directory, num_sequences=8, num_threads=1), ours=load(directory, 8)
    )
    if model.fits_gguf:
        file = load(write_gguf(root / "model.gguf", model))
        of_file = file.logits(file.prefill(PROMPT)[1])
        # Qwen's value heads, so the sums over them, are in another order; dots3-note's norms hold its factors.
        if model.gguf_architecture in ("qwen35moe", "qwen35", "qwen4exp", "dots3note"):
            np.testing.assert_allclose(of_file, logits, atol=2e-5 * max(1.0, float(np.abs(logits).max())))
        else:
            np.testing.assert_array_equal(of_file, logits)
    return decided


def _batch_of_8_is_its_sequences_alone(alone: Runner, ours: Runner) -> None:
    """Prompts and decode steps mixed in two steps."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate((3, 17, 40, 1, 8, 29, 5, 12))]
    expected = []
    for prompt in prompts:
        seq, first = alone.prefill(prompt)
        expected.append((first, alone.step((seq, [9]))[0]))
    sequences = [ours.sequence(len(prompt)) for prompt in prompts]
    begun = ours.step(*zip(sequences[:5], prompts[:5], strict=True))
    parts = [(seq, [9]) for seq in sequences[:5]] + list(zip(sequences[5:], prompts[5:], strict=True))
    mixed = ours.step(*parts)
    last = ours.step(*((seq, [9]) for seq in sequences[5:]))
    for n, (first, second) in enumerate(expected):
        np.testing.assert_array_equal(begun[n] if n < 5 else mixed[n], first)
        np.testing.assert_array_equal(mixed[n] if n < 5 else last[n - 5], second)
