"""EAGLE-3's drafts against transformers' hidden states and a torch reference of the head; heads that do not fit."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.step.drafters import eagle3
from twofold.step.drafters.eagle3 import Eagle3Drafter
from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import Asked, answers
from tests.models.transformers_runs import one_torch_thread, reference
from tests.tiny_models.eagle3 import TinyEagle3, fused_states, reference_states
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

LAYERS = (0, 1, 2)
HEAD = TinyEagle3(target_layers=LAYERS)


def load(model: Path, head: Path, depth: int = 4) -> Engine:
    config = (
        f'{{"method": "eagle3", "model": "{head}", "num_speculative_tokens": {depth}, "adaptive": false}}'
    )
    return Engine.load(
        EngineConfig(
            model=str(model),
            accelerator="none",
            cpu_threads=1,
            page_size=4,
            max_total_tokens=512,
            max_num_batched_tokens=24,
            enable_prefix_caching=False,
            kv_cache_dtype="float32",
            speculative_config=config,
        )
    )


def reference_draft(model: object, head: Path, text: Seq[int], depth: int) -> list[int]:
    """The head's greedy draft after a text, from the beginning."""
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states  # type: ignore[operator]
    joined = torch.cat([hidden[layer][0] for layer in LAYERS], -1)[:-1]
    states, tokens = fused_states(head, joined.numpy()), list(text[1:])
    from safetensors.torch import load_file

    d2t = load_file(head / "model.safetensors")["d2t"]
    drafted: list[int] = []
    for _ in range(depth):
        out, logits = reference_states(head, states, torch.tensor(tokens))
        at = int(logits[-1].argmax())
        drafted.append(at + int(d2t[at]))
        states, tokens = torch.cat([states, out[-1:]]), [*tokens, drafted[-1]]
    return drafted


@pytest.mark.parametrize("most_kept", [3, 64])
@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_drafts_are_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, most_kept: int
) -> None:
    """After prompts in chunks, accepted and rejected drafts and steps without one, in a batch."""
    monkeypatch.setattr(eagle3, "MAX_PENDING_STATES", most_kept)
    tiny = replace(EXAMPLES["llama"], num_layers=4) if family == "dense" else TinyModel(num_layers=4)
    model = write_tiny_model(tmp_path / "model", tiny)
    size = {"hidden_size": tiny.hidden_size, "target_hidden_size": tiny.hidden_size}
    head = replace(HEAD, **size).write(tmp_path / "head")  # type: ignore[arg-type]
    engine = load(model, head)
    assert engine.speculator is not None
    assert engine.speculator._model is not None
    drafter = engine.speculator._model.drafter
    assert isinstance(drafter, Eagle3Drafter)
    draw, seen = random.Random(4), list[tuple[tuple[int, ...], tuple[int, ...]]]()

    def watched(sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        if draw.random() < 0.4:  # a step whose price allows no draft
            return [Draft((), ())] * len(sequences)
        drafts = Eagle3Drafter.propose_all(drafter, sequences, depths)
        seen.extend((tuple(s.token_ids), draft.tokens) for s, draft in zip(sequences, drafts, strict=True))
        return drafts

    drafter.propose_all = watched  # type: ignore[method-assign]
    requested = [
        Asked(
            tuple(random_prompt(n, n)), SamplingParams(max_tokens=20, temperature=t, seed=n, ignore_eos=True)
        )
        for n, t in ((5, 1.0), (60, 0.0), (33, 1.0))
    ]
    answers(engine, requested, 2)
    engine.close()
    made = [(text, tokens) for text, tokens in seen if tokens]
    assert len(made) > 15
    transformer = reference(model)
    for text, tokens in draw.sample(made, 12):
        assert list(tokens) == reference_draft(transformer, head, text, len(tokens))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=4))
    for number, (head, error, message) in enumerate((
        (replace(HEAD, target_hidden_size=64), ConfigError, "target_hidden_size is 64; the model has 48"),
        (replace(HEAD, vocab_size=400), ConfigError, "vocab_size is 400; the model has 320"),
        (replace(HEAD, target_layers=(0, 1, 9)), ModelLoadError, "three layers of the model's 4"),
        (replace(HEAD, hidden_size=64, has_embedding=False), ConfigError, "head without an embedding"),
    )):  # fmt: skip
        with pytest.raises(error, match=message):
            load(model, head.write(tmp_path / f"head {number}"))
    damaged = HEAD.write(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(model, damaged)
