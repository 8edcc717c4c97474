"""The dense part of a model in torch, run on the CPU with the reference kernels, against the native CPU model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.device_step import DeviceBatch, gated
from twofold.blocks.router import Router
from twofold.device.decode_inputs import DecodeRow
from twofold.device.graphs import DecodeGraphs
from twofold.device.kernels import TorchKernels
from twofold.device.model import DeviceModel
from twofold.models.model_files import open_model_files

from tests.device.fake_device import FakeDevice, FakeQueue
from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.writing import TinyModel, write_tiny_model

CPU = torch.device("cpu")
PAGE = 8
PAGES = (5, 2, 7, 1, 9, 3)
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


class TorchMoe:
    """All experts in f32 from the files."""

    def __init__(self, model: DeviceModel, files: object, pool: ops.ThreadPool) -> None:
        self.calls: list[int] = []
        self._experts = [
            [[torch.from_numpy(ops.dequantise(pool, matrix)) for matrix in expert] for expert in layer]
            for layer in (files.expert_weights(index) for index in model.config.moe_layers)
        ]
        routed = self._routed = model.config.routed
        self._limits = model.config.expert_limits or (0.0,) * len(model.config.moe_layers)
        sizes = (routed.num_experts, 2 * routed.intermediate_size + routed.hidden_size)
        biases = (files.expert_biases(index) for index in model.config.moe_layers)
        self._biases = [torch.zeros(sizes) if found is None else torch.from_numpy(found) for found in biases]

    look_ahead = None

    def cache_prior(self, moe_layer, num_tokens):
        return None

    def forward(self, moe_layer, normed, ids, weights, hidden) -> None:
        self.calls.append(moe_layer)
        for t in range(len(normed)):
            for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
                if expert < 0:
                    continue
                gate, up, down = self._experts[moe_layer][expert]
                x, inner = normed[t].float(), self._routed.intermediate_size
                gate_bias, up_bias, bias = self._biases[moe_layer][expert].split(
                    [inner, inner, self._routed.hidden_size]
                )
                limit = self._limits[moe_layer]
                both = gated(self._routed.activation, gate @ x + gate_bias, up @ x + up_bias, limit)
                hidden[t] += weight * (down @ both + bias)


def device_model(path: Path) -> tuple[DeviceModel, TorchMoe]:
    pool = ops.ThreadPool(1)
    files = open_model_files(path)
    model = DeviceModel(files, pool, CPU, TorchKernels(), max_length=64)
    return model, TorchMoe(model, files, pool)


def chunk(tokens: list[int], begin: int, count: int) -> DeviceBatch:
    """One sequence's rows [begin, begin + count) as a prefill chunk."""
    positions = torch.arange(begin, begin + count)
    pages = torch.tensor(PAGES, dtype=torch.int32)
    return DeviceBatch(
        token_ids=torch.tensor(tokens[begin : begin + count]),
        positions=positions,
        slot_mapping=pages[positions // PAGE].long() * PAGE + positions % PAGE,
        page_tables=pages[None],
        seq_lens=torch.tensor([begin + count], dtype=torch.int32),
        query_lens=(count,),
        host_seq_lens=(begin + count,),
        records=torch.zeros(1, dtype=torch.int32),
    )


def cpu_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """[T, vocabulary] of the native model, experts on the CPU."""
    runner = load(path)
    return runner.logits(runner.prefill(tokens)[1])


def close(ours: torch.Tensor, reference: np.ndarray) -> bool:
    """Within what rounding activations to bf16 costs over a few layers."""
    error = np.linalg.norm(ours.numpy() - reference) / np.linalg.norm(reference)
    return bool(error < 0.03)


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


def decode_graphs(step, max_pages: int) -> DecodeGraphs:
    return DecodeGraphs(step, FakeQueue(lambda: None), FakeDevice(), PAGE, max_pages)


def run(graphs: DecodeGraphs, rows: list[DecodeRow]) -> torch.Tensor:
    (out,) = graphs.start(rows)
    graphs.queue.wait()
    return out.clone()


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


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why(tmp_path: Path) -> None:
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
