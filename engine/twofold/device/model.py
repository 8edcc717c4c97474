"""The dense part of a model on a device: runs the blocks of its layers, independent of their types.

Each block implements its own computation; `kernels` has the operations torch lacks; the given `DeviceMoe` runs the
routed experts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofold.api.errors import ModelLoadError
from twofold.api.media import deep_rows
from twofold.blocks import ops
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import (
    I64,
    DeviceBatch,
    DeviceKernels,
    DeviceMoe,
    DeviceState,
    DeviceStep,
    LookAheadRouter,
)
from twofold.blocks.residual_device import begun_residuals, joined, run_blocks
from twofold.blocks.rope import axes_of_pairs, rope_tables
from twofold.device.adapters.matrices import DeviceMatrices
from twofold.device.adapters.step import AdaptedStep
from twofold.device.host_inputs import StepInputs
from twofold.models.config import ModelConfig
from twofold.models.model_files import ModelFiles
from twofold.weights.weight_format import WeightMatrix


class TorchWeights:
    """See `DeviceWeights`: a block's tensors, dequantised on `pool` and copied to `device`."""

    def __init__(
        self,
        source: BlockWeights,
        pool: ops.ThreadPool,
        device: torch.device,
        matrices: DeviceMatrices | None = None,
        home: int = 0,
    ) -> None:
        """matrices: note there of which matrices each tensor is, and the number of its device, home."""
        self.source, self._pool, self._device, self._home = source, pool, device, home
        self._matrices = DeviceMatrices() if matrices is None else matrices
        self._vectors: dict[str, Tensor] = {}

    def matrix(self, *parts: str) -> Tensor:
        whole = torch.cat([self._copied(part, self.source.matrix(part)) for part in parts])
        specs = [self.source.specs[part] for part in parts]
        self._matrices.add(whole, [(spec.name, spec.shape[0]) for spec in specs], self._home)
        return whole

    def reordered(self, matrix: Tensor, *, rows: I64 | None = None, columns: I64 | None = None) -> Tensor:
        made = matrix
        for dimension, order in enumerate((rows, columns)):
            if order is not None:
                made = made.index_select(dimension, torch.from_numpy(order).to(made.device))
        self._matrices.derive(made, matrix, rows=rows, columns=columns)
        return made

    def by_head(self, matrix: Tensor, rows: I64, *, is_transposed: bool = False) -> Tensor:
        heads = matrix[torch.from_numpy(rows).to(matrix.device)]
        made = heads.transpose(1, 2).contiguous() if is_transposed else heads
        self._matrices.divide(made, matrix, rows, is_transposed=is_transposed)
        return made

    def stack(self, part: str) -> Tensor:
        return torch.stack([self._copied(part, matrix) for matrix in self.source.stack(part)])

    def exact(self, part: str) -> Tensor:
        """See `DeviceWeights.exact`: bf16 as in the checkpoint, so that CPU and device route alike."""
        return self.matrix(part).float()

    def vector(self, part: str) -> Tensor | None:
        return self.norm(part) if part in self.source else None

    def norm(self, part: str = "norm") -> Tensor:
        """See `DeviceWeights.norm`; one tensor for all operators of the block that read it."""
        if part not in self._vectors:
            values = np.array(self.source.vector(part), np.float32)
            self._vectors[part] = torch.from_numpy(values).to(self._device)
        return self._vectors[part]

    def bias(self, *parts: str) -> Tensor | None:
        if parts[0] not in self.source:
            return None
        return torch.cat([self.norm(part) for part in parts]).bfloat16()

    def _copied(self, part: str, matrix: WeightMatrix) -> Tensor:
        """bf16 on the device. Raises ModelLoadError for a NaN or an infinity."""
        copy = torch.from_numpy(ops.dequantise(self._pool, matrix)).to(self._device, torch.bfloat16)
        if not torch.isfinite(copy.sum(dtype=torch.float64)):  # allocates nothing of the matrix's size
            raise self.source.refused(ValueError(f"{part} holds a NaN or an infinity"), "dense weights")
        return copy


@dataclasses.dataclass(frozen=True)
class Stage:
    """A device that computes some of the layers."""

    device: torch.device
    kernels: DeviceKernels
    active: Callable[[], AbstractContextManager[object]] = nullcontext
    """See `Device.active`."""


class DeviceModel:
    """Dense weights on `device` and the forward pass over them. One step at a time."""

    def __init__(
        self,
        files: ModelFiles,
        pool: ops.ThreadPool,
        device: torch.device,
        kernels: DeviceKernels,
        max_length: int,
        *,
        others: Sequence[Stage] = (),
        homes: Sequence[int] = (),
    ) -> None:
        """Copy everything but the experts to the devices, for sequences of at most `max_length` tokens.

        homes: the device of each layer, 0 for `device`, n for `others[n - 1]`; empty: all layers are on `device`.

        Raises:
            ModelLoadError: the device's memory is too small (the message names the flags to lower), or the rotation
                depends on the prompt's length.
        """
        self.config = config = files.config
        if (problem := _missing_on_device(config, kernels)) is not None:
            raise ModelLoadError(
                f"{files.tensors.where}: {problem} does not run on a device; use --accelerator none"
            )
        self.device = device
        self._stages = (Stage(device, kernels), *others)
        self._specs = list(itertools.chain.from_iterable(config.layers))

        self._homes = [homes[block.layer] if homes else 0 for block in self._specs]
        self._stretches: dict[int, list[tuple[int, int, range]]] = {}

        self.matrices = DeviceMatrices()  # where adapters find each matrix

        def on_device(weights: BlockWeights, home: int) -> TorchWeights:
            return TorchWeights(weights, pool, self._stages[home].device, self.matrices, home)

        embedding, head = (TorchWeights(each, pool, device) for each in (files.embedding, files.head))
        try:
            self._embedding = embedding.matrix("table")
            self.inputs = StepInputs.of_model(files, pool)
            layer_inputs = config.embedding.layer_inputs
            self._layer_inputs = None if layer_inputs is None else layer_inputs.device(embedding)
            moe_layers = {layer: index for index, layer in enumerate(config.moe_layers)}
            self._blocks = [
                block.device(on_device(weights, home), moe_layers.get(block.layer, -1))
                for (block, weights), home in zip(files.blocks(), self._homes, strict=True)
            ]
            self._state_of = _owners_of_state(self._specs)
            self._begun = begun_residuals(self._blocks)
            self._routers = [block for block in self._blocks if isinstance(block, LookAheadRouter)]
            norm = config.head.norm(files.head)
            self._final_norm = None if norm is None else torch.from_numpy(norm).to(device)
            self._head = self._embedding if config.head.tied else head.matrix("vocabulary")
            self._rotations = self._rotation_tables(max_length)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"the dense weights do not fit into the memory of {device}; free some of it, or lower "
                "--max-total-tokens and --gpu-experts-ratio"
            ) from error

    def _rotation_tables(self, max_length: int) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """(cosines, sines) by home, then by table."""
        positions = np.arange(max_length, dtype=np.int32)
        config = self.config
        tables = [
            rope.rows(positions, positions)
            for rope in rope_tables(config.rotations, config.max_position_embeddings)
        ]
        return {
            home: [
                (torch.from_numpy(cos).to(on := self._stages[home].device), torch.from_numpy(sin).to(on))
                for cos, sin in tables
            ]
            for home in {0, *self._homes}
        }

    def state(self, num_pages: int, page_size: int, num_records: int = 0) -> list[DeviceState]:
        """Zeroed memory for each block's state of all sequences."""

        def allocate_at(home: int) -> Callable[..., Tensor]:
            def allocate(shape: Iterable[int], *, exact: bool = False) -> Tensor:
                dtype = torch.float32 if exact else torch.bfloat16
                return torch.zeros(tuple(shape), dtype=dtype, device=self._stages[home].device)

            return allocate

        return [
            block.device_state(num_pages, page_size, allocate_at(home), num_records)
            for block, home in zip(self._specs, self._homes, strict=True)
        ]

    def blocks_with_state(self, state: list[DeviceState]) -> list[tuple[Block, DeviceState]]:
        """Each block's description with its state."""
        return list(zip(self._specs, state, strict=True))

    def forward(
        self,
        batch: DeviceBatch,
        state: list[DeviceState],
        moe: DeviceMoe,
        adapted: AdaptedStep | None = None,
    ) -> Tensor:
        """Hidden states f32 [T, hidden] after the last layer; updates the blocks' `state`.

        adapted: adapters of the rows; None: no row uses one.
        """
        with nullcontext() if adapted is None else adapted.dense_products():
            return self._forward(batch, state, moe, adapted)

    def _forward(
        self, batch: DeviceBatch, state: list[DeviceState], moe: DeviceMoe, adapted: AdaptedStep | None
    ) -> Tensor:
        hidden = self._embedding[batch.token_ids].float()
        if adapted is not None:
            adapted.change_embeddings(batch.token_ids, hidden)
        if self.config.embedding.scale != 1.0:
            hidden *= self.config.embedding.scale
        for part in batch.media:
            hidden[part.where] = torch.from_numpy(part.rows).to(hidden.device)
        if self._layer_inputs is not None:
            token_ids = batch.token_ids.clone() if batch.media else batch.token_ids
            if (media_token := self._layer_inputs.inputs.media_token) is not None:
                for part in batch.media:
                    token_ids[part.where] = media_token
            batch = dataclasses.replace(batch, layer_inputs=self._layer_inputs(token_ids, hidden))
        step = self._step_at(0, batch, moe)
        totals = [hidden]
        at = 0
        num_deep = max((part.num_deep for part in batch.media), default=0)
        for home, layer, blocks in self._stretches_of(num_deep):
            for where, rows in deep_rows(batch.media, layer - 1):
                totals[0][where] += torch.from_numpy(rows).to(totals[0].device)
            with self._stages[home].active():
                if home != at:
                    chosen = step.chosen_positions
                    step = self._step_at(home, batch, moe)
                    if chosen is not None:
                        lists = self._moved(chosen.positions, home), self._moved(chosen.counts, home)
                        step.chosen_positions = ChosenPositions(*lists)
                    totals = [self._moved(total, home) for total in totals]
                run_blocks(
                    [(self._blocks[n], self._begun[n], self._state_read(n, state)) for n in blocks],
                    totals,
                    step,
                )
            at = home
        return self._moved(joined(totals[0]), 0)

    def _state_read(self, block: int, state: list[DeviceState]) -> DeviceState:
        """What a block reads: its own state, after that of an earlier layer's block if it reads it."""
        owner = self._state_of[block]
        return state[block] if owner == block else (*state[owner], *state[block])

    def _stretches_of(self, num_deep: int) -> list[tuple[int, int, range]]:
        """(device, layer, blocks) of consecutive blocks on one device, cut before each of the layers 1 to `num_deep`,
        of which the first stretch after a cut has the number, all others 0."""
        if num_deep not in self._stretches:
            layers = [min(block.layer, num_deep) for block in self._specs]
            made = self._stretches[num_deep] = []
            begin = before = 0
            for (home, layer), blocks in itertools.groupby(zip(self._homes, layers, strict=True)):
                end = begin + len(list(blocks))
                made.append((home, layer if layer > before else 0, range(begin, end)))
                begin, before = end, layer
            if before < num_deep:  # the last layers have rows of their own
                made.append((self._homes[-1], num_deep, range(0)))
        return self._stretches[num_deep]

    def _step_at(self, home: int, batch: DeviceBatch, moe: DeviceMoe) -> DeviceStep:
        """Memory shared by the blocks on one device. batch: on the first device."""
        if home > 0:
            moved: dict[str, Any] = {
                name: self._moved(value, home)
                for name, value in vars(batch).items()
                if isinstance(value, Tensor)
            }
            batch = dataclasses.replace(batch, **moved)
        rotations = [self._angles(home, table, batch) for table in range(len(self._rotations[home]))]
        return DeviceStep(batch, rotations, self._stages[home].kernels, moe, self._routers)

    def _angles(self, home: int, table: int, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the batch's rows, by `ModelConfig.rotations`' number of the table."""
        cos, sin = self._rotations[home][table]
        positions = batch.positions if batch.rotations is None or table > 0 else batch.rotations
        if positions.ndim == 1:
            return cos[positions], sin[positions]
        axes = torch.from_numpy(axes_of_pairs(*self.config.rotations[table])).to(cos.device)
        chosen = positions[axes].T.contiguous(), torch.arange(len(axes), device=cos.device)
        return cos[chosen], sin[chosen]

    def _moved(self, tensor: Tensor, home: int) -> Tensor:
        return tensor.to(self._stages[home].device, non_blocking=True)

    def final_states(self, hidden_rows: Tensor) -> Tensor:
        """Hidden states f32 [R, hidden] after the last norm, of rows of forward's result."""
        return self._normed(hidden_rows) / self.config.head.scale

    def _normed(self, rows: Tensor) -> Tensor:
        """Rows after the last norm, if there is one, times the head's scale."""
        if self._final_norm is None:
            return rows
        return torch.nn.functional.rms_norm(rows, rows.shape[-1:], self._final_norm, self.config.head.eps)

    def logits(self, hidden_rows: Tensor, adapted: AdaptedStep | None = None) -> Tensor:
        """Logits f32 [R, vocabulary] of rows of forward's result, whose adapters `adapted` has."""
        rows = self._normed(hidden_rows).bfloat16()
        logits = torch.nn.functional.linear(rows, self._head).float()
        if adapted is not None:
            adapted.change_logits(rows, logits)
        cap = self.config.head.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _missing_on_device(config: ModelConfig, kernels: DeviceKernels) -> str | None:
    """Part of the model that does not run with these kernels; None: all of it does."""
    if any(rope.kind == "dynamic" for rope, _ in config.rotations):
        return "dynamic RoPE scaling, which depends on the prompt's length,"
    if kernels.native is None:  # plain torch
        return None
    found = (block.missing_in_device_kernels for layer in config.layers for block in layer)
    return next((part for part in found if part is not None), None)


def _owners_of_state(blocks: Sequence[Block]) -> list[int]:
    """For each block, the block whose state it reads: itself, or that of its kind in `state_layer`."""
    owners = {(block.layer, block.kind): n for n, block in enumerate(blocks)}
    return [
        n if block.state_layer == block.layer else owners[block.state_layer, block.kind]
        for n, block in enumerate(blocks)
    ]
