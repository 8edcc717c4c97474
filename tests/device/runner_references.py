"""Logits that the device runner's are held to: the same model on the fake device without slots, and in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from tests.device.runner_runs import F32, make_cpu_runner, make_runner, scripted
from tests.tiny_models.writing import TinyModel, write_tiny_model, write_weights

TINY = TinyModel(
    dtype="bfloat16", hidden_size=64, head_dim=32, num_layers=4, mlp_only_layers=(1,), num_experts=10
)
TOKENS = 8


def errors_of(ours: F32, reference: F32) -> F32:
    """Relative error of each row."""
    errors: F32 = np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)
    return errors


class References:
    """Logits of scripted conversations by batch size and tokens: no slots, every step placed by the host."""

    def __init__(self, fake: ModuleType, path: Path, in_f32: Path) -> None:
        self._fake, self._path, self._in_f32 = fake, path, in_f32
        self._made: dict[tuple[int, int], tuple[F32, float]] = {}

    def of(self, size: int, tokens: int) -> tuple[F32, float]:
        """The logits, and how far a row is from that of the same weights without a rounding to bf16, relatively.

        In the median: where rounding turns a tie between two experts, the row goes elsewhere.
        """
        if (size, tokens) not in self._made:
            runner = make_runner(self._fake, self._path, slots=0, table_steps=False)
            logits = scripted(runner, size, tokens, TINY.vocab_size)
            exact = scripted(make_cpu_runner(self._in_f32), size, tokens, TINY.vocab_size)
            self._made[size, tokens] = logits, float(np.median(errors_of(logits, exact)))
        return self._made[size, tokens]

    def close(self, ours: F32, size: int, tokens: int = TOKENS) -> bool:
        """Every row is within twice the distance that roundings to bf16 make."""
        logits, distance = self.of(size, tokens)
        return bool((errors_of(ours, logits) <= 2 * distance).all())


def references_of(weights: dict[str, F32], fake: ModuleType, path: Path, folder: Path) -> References:
    """References of the model in `path`, whose weights are these rounded to bf16."""
    in_f32 = write_tiny_model(folder, replace(TINY, dtype="float32"))
    rounded = {name: torch.from_numpy(values).bfloat16().float().numpy() for name, values in weights.items()}
    write_weights(in_f32, rounded, dtype="float32", num_shards=TINY.num_shards)
    return References(fake, path, in_f32)
