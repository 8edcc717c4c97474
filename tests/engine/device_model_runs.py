"""The dense part of a model in torch on the CPU, driven by tests: chunks of a prompt, decode steps, logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from twofold.blocks import ops
from twofold.blocks.device_step import DeviceBatch, gated
from twofold.blocks.ngram_hash import ngram_ids
from twofold.device.decode_inputs import DecodeRow
from twofold.device.graphs import DecodeGraphs
from twofold.device.kernels import TorchKernels
from twofold.device.model import DeviceModel
from twofold.models.config import expert_limits
from twofold.models.model_files import open_model_files

from tests.device.fake_device import FakeDevice, FakeQueue
from tests.engine.model_runs import load

CPU = torch.device("cpu")
PAGE = 8
PAGES = (5, 2, 7, 1, 9, 3)


class TorchMoe:
    """All experts in f32 from the files."""

    def __init__(self, model: DeviceModel, files: object, pool: ops.ThreadPool) -> None:
        self.calls: list[int] = []
        self._experts = [
            [[torch.from_numpy(ops.dequantise(pool, matrix)) for matrix in expert] for expert in layer]
            for layer in (files.expert_weights(index) for index in model.config.moe_layers)
        ]
        routed = self._routed = model.config.routed
        self._limits = expert_limits(model.config.layers) or (0.0,) * len(model.config.moe_layers)
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


def layer_inputs(model: DeviceModel, tokens: list[int], begin: int, count: int) -> np.ndarray | None:
    """What the host computes for the sequence's rows [begin, begin + count)."""
    if model.inputs is None:
        return None
    return model.inputs.of_ids(ngram_ids(tokens[: begin + count], begin, model.inputs.tables.num_ids))


def chunk(tokens: list[int], begin: int, count: int, inputs: np.ndarray | None = None) -> DeviceBatch:
    """One sequence's rows [begin, begin + count) as a prefill chunk. inputs: see `layer_inputs`."""
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
        layer_inputs=None if inputs is None else torch.from_numpy(inputs),
    )


def cpu_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """[T, vocabulary] of the native model, experts on the CPU."""
    runner = load(path)
    return runner.logits(runner.prefill(tokens)[1])


def close(ours: torch.Tensor, reference: np.ndarray) -> bool:
    """Within what rounding activations to bf16 costs over a few layers."""
    error = np.linalg.norm(ours.numpy() - reference) / np.linalg.norm(reference)
    return bool(error < 0.03)


def decode_graphs(step, max_pages: int, input_width: int = 0) -> DecodeGraphs:
    return DecodeGraphs(step, FakeQueue(lambda: None), FakeDevice(), PAGE, max_pages, input_width=input_width)


def run(graphs: DecodeGraphs, rows: list[DecodeRow]) -> torch.Tensor:
    (out,) = graphs.start(rows)
    graphs.queue.wait()
    return out.clone()


def held_by(thing: Any, kind: type) -> list[Any]:
    """The tensors of a model and of the operators that it holds, each once."""
    found: dict[int, Any] = {}
    open_things = [thing]
    while open_things:
        item = open_things.pop()
        if isinstance(item, kind):
            found[id(item)] = item
        elif isinstance(item, list | tuple | dict):
            open_things.extend(item.values() if isinstance(item, dict) else item)
        elif item is thing or type(item).__name__.endswith(("OnDevice", "Ffn")):
            open_things.extend(vars(item).values())
    return list(found.values())
