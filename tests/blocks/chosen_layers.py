"""Two layers of attention, the second of which attends to the positions that the first one's chooser chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from twofold.blocks import ops
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Selection
from twofold.blocks.block import Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBatch, DeviceKernels, DeviceStep
from twofold.blocks.gqa import Gqa
from twofold.blocks.mla import Mla
from twofold.device.model import TorchWeights
from twofold.device.native_kernels import NativeDenseKernels
from twofold.weights.checkpoint import Checkpoint

from tests.device.conftest import built_module
from tests.device.fake_device import FakeDevice
from tests.tiny_models.writing import write_safetensors

HIDDEN, PAGE_SIZE, MAX_PAGES = 64, 4, 5
PROMPTS = (11, 3)
"""Tokens of two sequences, which are followed by three decode steps."""
F32 = NDArray[np.float32]

GQA = Gqa(0, HIDDEN, num_heads=4, num_kv_heads=2, head_dim=64, eps=1e-6)
MLA = Mla(
    0,
    HIDDEN,
    num_heads=3,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    eps=1e-6,
    scores=Scores(24**-0.5),
)


def steps() -> list[tuple[list[int], list[int]]]:
    """Positions and sequences of each step's tokens."""
    prompts = [(p, s) for s, length in enumerate(PROMPTS) for p in range(length)]
    decode = [[(length + n, s) for s, length in enumerate(PROMPTS)] for n in range(3)]
    return [tuple(map(list, zip(*step, strict=True))) for step in (prompts, *decode)]  # type: ignore[misc]


class Layers:
    """Two layers of one kind; the second attends to what the first one's chooser chose."""

    def __init__(self, block: Gqa | Mla, directory: Path, first: Selection, second: Selection) -> None:
        self.pool = ops.ThreadPool(2)
        self.blocks = [replace(block, layer=n, select=each) for n, each in enumerate((first, second))]
        rng = np.random.default_rng(2)
        specs = [each.tensors(lambda spec: False) for each in self.blocks]
        tensors = {
            spec.name: rng.normal(0, spec.shape[-1] ** -0.5, spec.shape).astype(np.float32)
            for layer in specs
            for spec in layer.values()
        }
        write_safetensors(directory / "model.safetensors", tensors, "bfloat16")
        source = Checkpoint.open(directory)
        self.weights = [BlockWeights(source, layer) for layer in specs]
        self.inputs = [
            rng.standard_normal((len(positions), HIDDEN)).astype(np.float32) for positions, _ in steps()
        ]
        angles = np.arange(20)[:, None] / 7 ** np.linspace(0, 2, 32 if isinstance(block, Gqa) else 4)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.tables = rng.permutation(2 * MAX_PAGES).reshape(2, MAX_PAGES).astype(np.int32)

    def on_cpu(self, dtype: str = "float32") -> list[F32]:
        made = zip(self.blocks, self.weights, strict=True)
        decoder = ops.Decoder([block.cpu(weights, self.pool, 0) for block, weights in made])
        planes = [
            [(kept.planes, kept.elements, dtype) for kept in block.state if isinstance(kept, Pages)]
            for block in self.blocks
        ]
        cache, out = ops.StateCache(planes, 2 * MAX_PAGES, PAGE_SIZE), []
        for (positions, sequences), given in zip(steps(), self.inputs, strict=True):
            batch = ops.AttentionBatch(
                np.array(positions, np.int32),
                np.array(sequences, np.int32),
                self.tables,
                np.ascontiguousarray(self.cos[positions]),
                np.ascontiguousarray(self.sin[positions]),
            )
            rows = given.copy()
            decoder.forward(rows, batch, cache)
            out.append(rows - given)
        return out

    def on_device(self, kernels: DeviceKernels) -> list[F32]:
        device = torch.device("cpu")
        made = [
            block.device(TorchWeights(weights, self.pool, device), 0)
            for block, weights in zip(self.blocks, self.weights, strict=True)
        ]

        def allocate(shape: tuple[int, ...], *, exact: bool = False) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32 if exact else torch.bfloat16)

        states = [block.device_state(2 * MAX_PAGES, PAGE_SIZE, allocate) for block in self.blocks]
        tables, out = torch.from_numpy(self.tables), []
        for n, ((places, sequences), given) in enumerate(zip(steps(), self.inputs, strict=True)):
            positions, lengths = torch.tensor(places), [length + n for length in PROMPTS]
            pages = tables[sequences, positions // PAGE_SIZE].long()
            batch = DeviceBatch(
                token_ids=torch.zeros_like(positions),
                positions=positions,
                slot_mapping=pages * PAGE_SIZE + positions % PAGE_SIZE,
                page_tables=tables,
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                query_lens=None if n else PROMPTS,
                host_seq_lens=() if n else PROMPTS,
            )
            angles = (torch.from_numpy(self.cos[places]), torch.from_numpy(self.sin[places]))
            step = DeviceStep(batch, [angles], kernels, None)  # type: ignore[arg-type]
            hidden = torch.from_numpy(given.copy())
            for operator, state in zip(made, states, strict=True):
                operator.forward(hidden, hidden, state, step)
            out.append(hidden.numpy() - given)
        return out


def native() -> DeviceKernels:
    return NativeDenseKernels(FakeDevice(built_module("twofold_fake").open_device()), MAX_PAGES * PAGE_SIZE)
