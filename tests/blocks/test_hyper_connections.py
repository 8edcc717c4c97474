"""Hyper-connections that mix their streams, and the head of the streams, against transformers' DeepSeek-V4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceStep
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.hyper_connection import HyperConnection, StreamHead
from twofold.blocks.residual_device import begun_residuals, run_blocks
from twofold.blocks.stream_mixes import WeightedStreams
from twofold.device.kernels import TorchKernels
from twofold.device.model import TorchWeights
from twofold.weights.checkpoint import Checkpoint

from tests.tiny_models.writing import write_safetensors

HIDDEN, TOKENS = 18, 9


class Streams:
    """Two feed-forward parts, each joined with the streams, and the head; and what transformers makes of the same."""

    def __init__(self, directory: Path, streams: int, rounds: int, eps: float) -> None:
        mix = WeightedStreams(
            streams, HIDDEN, eps=1e-5, offset=eps, magnitude=2.0, output_offset=0.0, rounds=rounds
        )
        self.blocks: list[Block] = []
        for layer in range(2):
            joins = HyperConnection(layer, mix, "attn_hc")
            self.blocks += [DenseFfn(layer, HIDDEN, 20, 1e-6), joins]
        self.blocks.append(StreamHead(1, mix, "model.hc_head.hc_"))
        specs, rng = (
            [block.tensors(lambda spec: False) for block in self.blocks],
            np.random.default_rng(streams),
        )
        self.tensors = {
            spec.name: rng.normal(0, 0.5, spec.shape).astype(np.float32)
            for part in specs
            for spec in part.values()
        }
        write_safetensors(directory / "model.safetensors", self.tensors, "float32")
        source, self.pool = Checkpoint.open(directory), ops.ThreadPool(2)
        self.weights = [BlockWeights(source, part) for part in specs]
        self.hidden = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        self.config = DeepseekV4Config(
            hidden_size=HIDDEN, hc_mult=streams, hc_sinkhorn_iters=rounds, hc_eps=eps, rms_norm_eps=1e-5
        )

    def loaded(self, module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        known = {
            name: torch.from_numpy(self.tensors[f"{prefix}{name}"]) for name, _ in module.named_parameters()
        }
        module.load_state_dict(known)
        return module

    def expected(self) -> np.ndarray:
        x = torch.from_numpy(self.hidden)[None, :, None].repeat(1, 1, self.config.hc_mult, 1)
        with torch.no_grad():
            for layer in range(2):
                name = f"model.layers.{layer}"
                joins = self.loaded(DeepseekV4HyperConnection(self.config), f"{name}.attn_hc.")
                post, comb, rows = joins(x)
                gate, up, down = (
                    torch.from_numpy(self.tensors[f"{name}.mlp.{part}_proj.weight"])
                    for part in ("gate", "up", "down")
                )
                norm = torch.from_numpy(self.tensors[f"{name}.post_attention_layernorm.weight"])
                rows = torch.nn.functional.rms_norm(rows, (HIDDEN,), norm, 1e-6)
                output = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
                x = post[..., None] * output[:, :, None] + comb.transpose(2, 3) @ x
            return self.loaded(DeepseekV4HyperHead(self.config), "model.hc_head.")(x)[0].numpy()


@pytest.mark.parametrize(("streams", "rounds", "eps"), [(4, 20, 1e-6), (3, 1, 0.02), (2, 5, 1e-3)])
def test_mixed_streams_and_their_head_equal_transformers(
    tmp_path: Path, streams: int, rounds: int, eps: float
) -> None:
    given = Streams(tmp_path, streams, rounds, eps)
    expected, opened = given.expected(), list(zip(given.blocks, given.weights, strict=True))
    decoder = ops.Decoder([block.cpu(weights, given.pool, 0) for block, weights in opened])
    rows = given.hidden.copy()
    batch = ops.AttentionBatch(
        np.arange(TOKENS, dtype=np.int32), np.zeros(TOKENS, np.int32), np.zeros((1, 1), np.int32),
        *np.zeros((2, TOKENS, 1), np.float32),
    )  # fmt: skip
    decoder.forward(rows, batch, ops.StateCache([[], []], 1, 16))
    np.testing.assert_allclose(rows, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))

    made = [
        block.device(TorchWeights(weights, given.pool, torch.device("cpu")), 0) for block, weights in opened
    ]
    step = DeviceStep(None, [], TorchKernels(), None)  # type: ignore[arg-type]
    totals = [torch.from_numpy(given.hidden.copy())]
    run_blocks(
        [(block, begun, ()) for block, begun in zip(made, begun_residuals(made), strict=True)], totals, step
    )
    difference = np.linalg.norm(totals[0].numpy() - expected)
    assert difference < 0.02 * np.linalg.norm(expected)  # a device's matrices are bf16
