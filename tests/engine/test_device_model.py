"""The dense part of a model in torch, run on the CPU with the reference kernels, against the native CPU model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from twofold.api.errors import ModelLoadError
from twofold.blocks.device_step import DeviceBatch
from twofold.blocks.router import Router
from twofold.device.decode_inputs import DecodeRow
from twofold.device.kernels import TorchKernels

from tests.engine.device_model_runs import (
    PAGE,
    PAGES,
    chunk,
    close,
    cpu_logits,
    decode_graphs,
    device_model,
    run,
)
from tests.engine.model_runs import random_prompt
from tests.tiny_models.writing import TinyModel, write_tiny_model

# All experts are routed to: a near tie at the border of the top-k, decided otherwise by rounding, would hide errors.
TINY = TinyModel(dtype="bfloat16", hidden_size=64, head_dim=32, num_heads=4, num_kv_heads=2, top_k=8)
CASES = {
    "qwen": TINY,
    "one-kv-head": replace(TINY, num_kv_heads=1),
    "dense-layers": replace(TINY, num_layers=4, mlp_only_layers=(0, 3)),
    "bias-tied-window": replace(TINY, attention_bias=True, tie_word_embeddings=True, sliding_window=9),
    "mixtral-yarn": replace(
        TINY,
        architecture="MixtralForCausalLM",
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_cpu_within_bf16_rounding(tmp_path: Path, name: str) -> None:
    path = write_tiny_model(tmp_path, CASES[name])
    tokens = random_prompt(33)
    model, moe = device_model(path)
    kv = model.state(10, PAGE)
    # Two chunks, then decode steps.
    parts = [model.forward(chunk(tokens, 0, 20), kv, moe), model.forward(chunk(tokens, 20, 9), kv, moe)]
    graphs = decode_graphs(lambda batch: (model.forward(batch, kv, moe),), len(PAGES))
    parts += [run(graphs, [DecodeRow(tokens[i], i, PAGES)]) for i in range(29, 33)]
    ours = model.logits(torch.cat(parts))
    assert close(ours, cpu_logits(path, tokens))
    assert graphs.fall_back_reason is None


def test_a_batch_is_padded_and_padding_changes_nothing(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, TINY)
    model, moe = device_model(path)
    prompts = [random_prompt(n, seed=n) for n in (5, 9, 12)]
    tables = [(1, 2), (4, 3), (6, 5)]
    kv = model.state(8, PAGE)
    sizes: list[int] = []

    def step(batch: DeviceBatch) -> tuple[torch.Tensor]:
        sizes.append(len(batch.token_ids))
        return (model.logits(model.forward(batch, kv, moe)),)

    graphs = decode_graphs(step, 2)
    alone = []
    for prompt, pages in zip(prompts, tables, strict=True):
        for position, token in enumerate(prompt):
            out = run(graphs, [DecodeRow(token, position, pages)])
        alone.append(out)
    again = run(
        graphs, [DecodeRow(p[-1], len(p) - 1, pages) for p, pages in zip(prompts, tables, strict=True)]
    )
    assert sizes[-1] == 4
    assert again.shape == (3, TINY.vocab_size)
    for row, before in zip(again, alone, strict=True):
        assert torch.allclose(row, before[0], atol=2e-2, rtol=2e-2)


def test_a_step_that_cannot_be_captured_runs_eagerly_with_the_reason(tmp_path: Path) -> None:
    def refuse(run, outputs):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = decode_graphs(lambda batch: (batch.token_ids[:, None].float(),), 2)
    graphs.queue.capture = refuse
    assert run(graphs, [DecodeRow(7, 0, (1,))]).tolist() == [[7.0]]
    assert graphs.fall_back_reason == (
        "capturing a step of 1 failed (operation not permitted when stream is capturing)"
    )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "1 to 32 rows, 0 were given"),
        ([DecodeRow(1, 0, (0,))] * 33, "33 were given"),
        ([DecodeRow(1, PAGE, (0,))], "the page of each position"),
        ([DecodeRow(1, 0, (0, 1, 2))], "at most 2 pages"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(rows: list[DecodeRow], says: str) -> None:
    graphs = decode_graphs(lambda batch: (batch.token_ids[:, None].float(),), 2)
    with pytest.raises(ValueError, match=says):
        graphs.start(rows)


def test_dynamic_rope_scaling_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    path = write_tiny_model(tmp_path, replace(TINY, rope_scaling=scaling, max_position_embeddings=32))
    with pytest.raises(ModelLoadError, match="--accelerator none"):
        device_model(path)


def test_routing_prefers_the_lower_number_among_equals() -> None:
    router = Router(0, hidden_size=8, num_experts=4, top_k=3, eps=1e-6, renormalise=True)
    ids, weights = TorchKernels().route(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), router, None)
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.sum().item() == pytest.approx(1.0)
