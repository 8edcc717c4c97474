"""Checks of dense blocks: one layer of each kind on a device against the CPU's kernels, on the model's weights.

A layer is cut into *units*, whose blocks depend on other units only through the residual stream. Each unit gets random
rows, a prefill chunk and then decode tokens of five sequences. They are the same on both sides, so an error does not
spread. The output of a routed expert is replaced by a random vector of its own, which shows how a token was routed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold import _core
from twofold.blocks import ops
from twofold.blocks.alone import alone
from twofold.blocks.block import Block
from twofold.blocks.device_step import DeviceBatch, DeviceBlock, DeviceState, DeviceStep, LookAheadRouter
from twofold.blocks.residual_device import ResidualOnDevice, begun_residuals, joined, run_blocks
from twofold.blocks.rope import rope_tables
from twofold.device.checks.experts import within
from twofold.device.checks.running import Figures
from twofold.device.device import Device
from twofold.device.model import TorchWeights
from twofold.models.model_files import ModelFiles, OpenBlock
from twofold.step.model import AttentionBatches, BatchMeta

F32 = npt.NDArray[np.float32]
LIMIT: Final = 1e-1
"""Largest median over rows of the relative error against the CPU: a device computes with bf16 inputs, and a near tie
may route a row to another expert. tests/gpu has the same limit for whole models."""
_PAGE_SIZE, _NUM_PAGES, _NUM_RECORDS = 16, 6, 5


@dataclass(frozen=True)
class _Rows:
    """Tokens of a batch. Sequence s has page s + 1 and record s."""

    name: str
    positions: tuple[int, ...]
    sequences: tuple[int, ...]

    @property
    def pages(self) -> list[list[int]]:
        """The block table of the batch's sequences."""
        return [[sequence + 1] for sequence in dict.fromkeys(self.sequences)]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the sequences after this batch."""
        return [1 + position for position in dict(zip(self.sequences, self.positions, strict=True)).values()]


_CHUNK: Final = _Rows("prefill", tuple(range(9)), (0,) * 9)
_TOKENS: Final = _Rows("decode", (9, 0, 0, 0, 0), (0, 1, 2, 3, 4))


def layers_to_check(files: ModelFiles, *, every_variant: bool) -> list[int]:
    """The first layer of each sequence of block types, of those that answer tokens; every_variant: of each
    configuration of these blocks, such as attention with and without a window."""
    found: dict[object, int] = {}
    for layer, blocks in enumerate(files.config.layers[: files.config.num_target_layers]):
        variant = tuple(
            dataclasses.replace(block, layer=0) if every_variant else type(block) for block in blocks
        )
        found.setdefault(variant, layer)
    return list(found.values())


def name_of_layer(files: ModelFiles, layer: int) -> str:
    kinds = dict.fromkeys(block.kind for block in files.config.layers[layer])
    return f"blocks of layer {layer} ({', '.join(kinds)})"


def check_layer(device: Device, pool: ops.ThreadPool, files: ModelFiles, layer: int) -> Figures:
    """Each unit of the layer against the CPU, and without a router also as a graph. Raises WrongResultError."""
    check = _LayerCheck(device, pool, files)
    errors: dict[str, float] = {}
    opened = [(alone(block), weights) for block, weights in files.layers[layer]]
    with device.active():
        made = [
            block.device(TorchWeights(weights, pool, device.torch_device), 0) for block, weights in opened
        ]
        for unit in _units(made):
            part = slice(unit.start, unit.stop)
            errors |= check.unit(opened[part], made[part])
    return within(errors, LIMIT)


def _units(blocks: Sequence[DeviceBlock]) -> Iterator[range]:
    """Blocks from a router to the layer's end are one unit, and so are a norm of outputs and the blocks it is over."""
    joined = set[int]()  # blocks that belong to the unit of the block before them
    for n, block in enumerate(blocks):
        if isinstance(block, LookAheadRouter):
            joined |= set(range(n + 1, len(blocks)))
        if isinstance(block, ResidualOnDevice):
            joined |= set(range(n - block.over + 1, n + 1))
    begins = [n for n in range(len(blocks)) if n not in joined]
    for begin, end in itertools.pairwise([*begins, len(blocks)]):
        yield range(begin, end)


@dataclass(frozen=True)
class _MarkedExperts:
    """See `DeviceMoe`: the output of expert e is row e of `marks`, whatever its input."""

    marks: Tensor
    """f32 [experts, hidden]."""
    look_ahead = None

    def cache_prior(self, moe_layer: int, num_tokens: int) -> None:
        return None

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        hidden += (weights[:, :, None] * self.marks[ids.long()]).sum(1)


class _LayerCheck:
    """Inputs and state of one layer on both sides."""

    def __init__(self, device: Device, pool: ops.ThreadPool, files: ModelFiles) -> None:
        self._device, self._pool, self._files = device, pool, files
        self._config = config = files.config
        self._kernels = device.kernels(_NUM_PAGES * _PAGE_SIZE)
        self._batches = AttentionBatches(config)
        self._cache = ops.StateCache(
            config.cache_planes("float32"), _NUM_PAGES, _PAGE_SIZE, config.record_bytes, _NUM_RECORDS
        )
        self._random = np.random.default_rng(0)
        self._executor, self._experts = self._marked_experts()
        inputs = config.embedding.layer_inputs
        self._layer_inputs = {
            rows: self._normal(len(rows.positions), inputs.width)
            for rows in (_CHUNK, _TOKENS)
            if inputs is not None
        }

    def _normal(self, *shape: int) -> F32:
        return self._random.standard_normal(shape, np.float32)

    def _marked_experts(self) -> tuple[_core.MoeExecutor | None, _MarkedExperts]:
        """Experts whose weights are zero and whose output is the bias of their last matrix, on both sides."""
        routed = self._config.routed
        marks = self._normal(max(1, routed.num_experts), self._config.hidden_size)
        on_device = _MarkedExperts(torch.from_numpy(marks).to(self._device.torch_device))
        if not self._config.moe_layers:
            return None, on_device
        width = 16
        store = _core.ExpertStore(
            routed.num_experts, routed.hidden_size, width, [("bf16", "bf16", "bf16")], biases=True
        )
        store.put_biases(0, 0, np.concatenate([np.zeros((len(marks), 2 * width), np.float32), marks], 1))
        return _core.MoeExecutor(self._pool, store), on_device

    def unit(self, opened: Sequence[OpenBlock], made: Sequence[DeviceBlock]) -> dict[str, float]:
        """Median relative errors of one unit: of a prefill chunk, of decode tokens, and of these by a graph."""
        name = ", ".join(dict.fromkeys(type(block).__name__ for block, _ in opened))
        own = [block.cpu(weights, self._pool, 0) for block, weights in opened]
        decoder = ops.Decoder(own)
        states = [self._state(block) for block, _ in opened]
        errors: dict[str, float] = {}
        for rows in (_CHUNK, _TOKENS):
            given = self._normal(len(rows.positions), self._config.hidden_size)
            expected = self._on_cpu(decoder, given, rows) - given
            run = functools.partial(self._on_device, made, states, torch.from_numpy(given), rows)
            before = [tensor.clone() for state in states for tensor in state]
            errors[f"{name}, {rows.name}"] = _median_error(run() - given, expected)
        if not any(isinstance(block, LookAheadRouter) for block in made):
            errors[f"{name}, graph"] = _median_error(self._by_graph(run, states, before) - given, expected)
        return errors

    def _state(self, block: Block) -> DeviceState:
        """Zeroed state of the block, after that of the block of its kind in the layer whose state it reads."""

        def allocate(shape: Iterable[int], *, exact: bool = False) -> Tensor:
            dtype = torch.float32 if exact else torch.bfloat16
            return torch.zeros(tuple(shape), dtype=dtype, device=self._device.torch_device)

        owner = next(
            each
            for each in (block, *self._config.layers[block.state_layer])
            if each.layer == block.state_layer and each.kind == block.kind
        )
        blocks = (owner,) if owner is block else (owner, block)
        states = (each.device_state(_NUM_PAGES, _PAGE_SIZE, allocate, _NUM_RECORDS) for each in blocks)
        return tuple(tensor for state in states for tensor in state)

    def _on_cpu(self, decoder: ops.Decoder, given: F32, rows: _Rows) -> F32:
        positions = np.array(rows.positions, np.int32)
        batch = self._batches.of(
            BatchMeta(
                positions,
                np.array(rows.sequences, np.int32),
                np.array(rows.pages, np.int32),
                np.array(rows.lengths, np.int32),
                records=np.array(list(dict.fromkeys(rows.sequences)), np.int32),
            )
        )
        hidden = given.copy()
        if self._executor is not None:
            self._executor.begin_step(int(rows is _TOKENS), rows.sequences, rows.positions)
        decoder.forward(hidden, batch, self._cache, self._executor, layer_inputs=self._layer_inputs.get(rows))
        if self._executor is not None:
            self._executor.end_step()
        return hidden

    def _step(self, rows: _Rows) -> DeviceStep:
        memory = self._device.torch_device

        def narrow(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=memory)

        positions = torch.tensor(rows.positions, device=memory)
        is_chunk, inputs = rows is _CHUNK, self._layer_inputs.get(rows)
        pages = torch.tensor([sequence + 1 for sequence in rows.sequences], device=memory)
        batch = DeviceBatch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            slot_mapping=pages * _PAGE_SIZE + positions,
            page_tables=narrow(rows.pages),
            seq_lens=narrow(rows.lengths),
            query_lens=(len(rows.positions),) if is_chunk else None,
            host_seq_lens=tuple(rows.lengths) if is_chunk else (),
            records=narrow(list(dict.fromkeys(rows.sequences))),
            layer_inputs=None if inputs is None else torch.from_numpy(inputs).to(memory),
        )
        on_host = np.array(rows.positions, np.int32)
        rotations = []
        for rope in rope_tables(self._config.rotations, self._config.max_position_embeddings):
            cos, sin = rope.rows(on_host, on_host)
            rotations.append((torch.from_numpy(cos).to(memory), torch.from_numpy(sin).to(memory)))
        return DeviceStep(batch, rotations, self._kernels, self._experts)

    def _on_device(
        self,
        blocks: Sequence[DeviceBlock],
        states: Sequence[DeviceState],
        given: Tensor,
        rows: _Rows,
        capture: Callable[[Callable[[], None], Tensor, Tensor], None] | None = None,
    ) -> F32:
        """Output rows, on the host. capture: runs the computation instead; gets it, its buffer and the input."""
        step, given = self._step(rows), given.to(self._device.torch_device)
        hidden, begun = given.clone(), begun_residuals(blocks)

        def compute() -> None:
            totals = [hidden]
            run_blocks(zip(blocks, begun, states, strict=True), totals, step)
            if totals[0] is not hidden:  # several streams
                hidden.copy_(joined(totals[0]))

        if capture is None:
            compute()
        else:
            capture(compute, hidden, given)
        self._device.synchronise()
        output: F32 = hidden.cpu().numpy()
        return output

    def _by_graph(
        self, run: Callable[..., F32], states: Sequence[DeviceState], before: Sequence[Tensor]
    ) -> F32:
        """Output of the same rows by a captured graph, from the state before them."""

        def capture(compute: Callable[[], None], hidden: Tensor, given: Tensor) -> None:
            replay = self._device.graph(compute)
            hidden.copy_(given)
            for tensor, kept in zip((each for state in states for each in state), before, strict=True):
                tensor.copy_(kept)
            replay()

        return run(capture=capture)


def _median_error(ours: F32, expected: F32) -> float:
    """Median over rows of ‖ours − expected‖ / ‖expected‖; NaN stays NaN."""
    norms = np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
    return float(np.median(np.linalg.norm(ours - expected, axis=1) / norms))
