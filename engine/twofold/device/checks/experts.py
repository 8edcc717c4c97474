"""Checks of routed experts against the CPU's kernels: two of each format, alone and in a step that the CPU serves.

The experts are a model's own, in the layouts of a device's slots and of the CPU's store. The tolerance covers
activations rounded to bf16 or 8 bits on both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.blocks import ops
from twofold.device.backend import StepServer
from twofold.device.checks.fixed_experts import DeviceExperts
from twofold.device.checks.running import Figures, WrongResultError
from twofold.device.device import Device
from twofold.device.layouts import layouts_of
from twofold.device.placed_share import DECODE_TOKENS, layers_on_tensor_cores
from twofold.experts.slot_plan import MoeShape
from twofold.models.model_files import ModelFiles
from twofold.step.expert_loading import moe_shape, open_mapped_experts
from twofold.weights.weight_format import ExpertFormats, distinct_formats, formats_by_expert

LIMIT: Final = 5e-2
"""Largest relative error against the CPU: twice that of one side against f32, which tests/gpu allows 2e-2."""
_WAIT_S: Final = 1.0
"""How long either side of a served step waits for the other."""
_DECODE_ROWS: Final = 2


@dataclass(frozen=True)
class ExpertPair:
    """Two experts of one layer in the same formats; one where there are no two."""

    store: _core.ExpertStore
    layer: int
    """Number of the layer in `store`."""
    shape: MoeShape
    """Shape of a model with this layer alone, in the pair's formats, whose tokens are routed to the pair."""
    experts: tuple[int, ...]
    """Their numbers in the layer."""

    def on_device(
        self,
        device: Device,
        num_resident: int,
        *,
        max_tokens: int = _DECODE_ROWS,
        handshake: str = "kernels",
    ) -> DeviceExperts:
        """The first `num_resident` of the pair in slots of `device`."""
        panels, offsets = np.asarray(self.store.panels(self.layer)), self.store.offsets(self.layer)
        size = layouts_of(self.shape)[0].kinds[0].bytes
        experts: list[Tensor | None] = [None] * self.shape.num_experts
        for expert in self.experts[:num_resident]:
            begin = offsets[expert] - offsets[0]
            experts[expert] = torch.from_numpy(np.array(panels.reshape(-1)[begin : begin + size]))
        return DeviceExperts(device, [experts], self.shape, max_tokens, handshake, _WAIT_S)

    def on_cpu(self, pool: ops.ThreadPool, rows: LayerRows) -> Tensor:
        """The layer's output by the CPU's kernels, f32 [T, hidden]."""
        executor = _core.MoeExecutor(pool, self.store)
        hidden = np.zeros((len(rows.normed), self.shape.hidden), np.float32)
        executor.begin_step(0, list(range(len(hidden))), [0] * len(hidden))
        normed, ids, weights = (part.cpu().numpy() for part in (rows.normed.float(), rows.ids, rows.weights))
        executor.forward(self.layer, normed, ids, weights, hidden)
        executor.end_step()
        return torch.from_numpy(hidden)


@dataclass(frozen=True)
class LayerRows:
    """Input of a layer on a device: rows, their experts and weights."""

    normed: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, device: torch.device, pair: ExpertPair, num_tokens: int) -> LayerRows:
        """Random rows, all of them routed to the pair."""
        generator = torch.Generator().manual_seed(num_tokens)
        normed = torch.randn(num_tokens, pair.shape.hidden, generator=generator).bfloat16()
        weights = torch.rand(num_tokens, pair.shape.top_k, generator=generator) + 0.1
        ids = torch.tensor(pair.experts, dtype=torch.int32).repeat(num_tokens, 1)
        return cls(normed.to(device), ids.to(device), weights.to(device))


def layers_by_format(files: ModelFiles) -> dict[ExpertFormats, int]:
    """The first layer with such experts, counted among those with any, for each triple of formats of (gate, up,
    down)."""
    found: dict[ExpertFormats, int] = {}
    for layer, of_layer in enumerate(files.expert_formats()):
        for formats in distinct_formats(of_layer):
            found.setdefault(formats, layer)
    return found


def expert_pair(
    files: ModelFiles, pool: ops.ThreadPool, moe_layer: int, formats: ExpertFormats | None = None
) -> ExpertPair:
    """The first experts of layer `moe_layer`, counted among layers with experts, that are in `formats`; None: in those
    of the first expert. Packed now unless they are in a panel file."""
    whole = moe_shape(files)
    limits = whole.limits[moe_layer : moe_layer + 1]
    of_layer = formats_by_expert(whole.formats[moe_layer], whole.num_experts)
    of_layer = of_layer[: whole.of_text.num_experts]
    formats = formats or of_layer[0]
    numbers = tuple(number for number, each in enumerate(of_layer) if each == formats)[:2]
    shape = dataclasses.replace(
        whole,
        num_layers=1,
        top_k=len(numbers),
        formats=(formats,),
        limits=limits,
    )
    if files.mapped is not None:
        return ExpertPair(open_mapped_experts(files.mapped, whole), moe_layer, shape, numbers)
    store = _core.ExpertStore(
        shape.top_k,
        shape.hidden,
        shape.intermediate,
        shape.formats,
        activation=shape.activation,
        biases=shape.biases,
        limits=limits,
    )
    layer = files.config.moe_layers[moe_layer]
    weights = files.expert_weights(layer)
    store.put(pool, 0, 0, [weights[number] for number in numbers])
    if (biases := files.expert_biases(layer)) is not None:
        store.put_biases(0, 0, np.ascontiguousarray(biases[list(numbers)]))
    return ExpertPair(
        store,
        0,
        dataclasses.replace(shape, num_experts=len(numbers), second_half=0),
        tuple(range(len(numbers))),
    )


def check_format(device: Device, pool: ops.ThreadPool, pair: Callable[[], ExpertPair]) -> Figures:
    """Decode and, where the format has such kernels, prefill of both experts. Raises WrongResultError."""
    experts = pair()
    errors: dict[str, float] = {}
    num_prefill = DECODE_TOKENS + 8 if layers_on_tensor_cores(experts.shape)[0] else 0
    for name, num_tokens in (("decode", _DECODE_ROWS), ("prefill", num_prefill)):
        if not num_tokens:
            continue
        with device.active():
            rows = LayerRows.random(device.torch_device, experts, num_tokens)
            on_device = experts.on_device(
                device, experts.shape.top_k, max_tokens=min(num_tokens, DECODE_TOKENS)
            )
            hidden = torch.zeros((num_tokens, experts.shape.hidden), device=device.torch_device)
            if name == "prefill":
                on_device.prefill(0, rows.normed, rows.ids, rows.weights, hidden)
            else:
                with on_device.rehearsal():
                    on_device.begin_step()
                    on_device.forward(0, rows.normed, rows.ids, rows.weights, hidden)
            device.synchronise()
            errors[name] = relative_error(hidden.cpu(), experts.on_cpu(pool, rows))
    return within(errors, LIMIT)


def check_served_step(
    device: Device, pool: ops.ThreadPool, pair: Callable[[], ExpertPair], kind: str, *, graph: bool
) -> Figures:
    """A step with expert 0 in a slot and expert 1 on the CPU, which answers by the handshake `kind` ("": the device's
    choice), twice. Raises WrongResultError, KernelError."""
    experts = pair()
    with device.active():
        kind = kind or device.handshake(experts.shape.hidden)
        rows = LayerRows.random(device.torch_device, experts, 1)
        on_device = experts.on_device(device, 1, handshake=kind)
        hidden = torch.zeros((1, experts.shape.hidden), device=device.torch_device)

        def step() -> None:
            on_device.begin_step()
            on_device.forward(0, rows.normed, rows.ids, rows.weights, hidden)

        results = served_twice(
            device,
            on_device,
            on_device.server(pool, experts.store),
            step,
            hidden,
            torch.zeros_like(hidden),
            graph=graph,
            limit_s=_WAIT_S,
        )
    expected = experts.on_cpu(pool, rows)
    errors = {f"step {n}": relative_error(result.cpu(), expected) for n, result in enumerate(results)}
    return {"handshake": kind} | within(errors, LIMIT)


def served_twice(
    device: Device,
    experts: DeviceExperts,
    server: StepServer,
    step: Callable[[], None],
    hidden: Tensor,
    residual: Tensor,
    *,
    graph: bool,
    limit_s: float,
) -> list[Tensor]:
    """`hidden` after each of two runs of `step` from `residual`, eager or captured; `server` computes the CPU's part.

    Raises:
        WrongResultError: a side got no answer, or the two runs differ.
    """
    replay: Callable[[], object] = step
    if graph:
        with experts.rehearsal():
            step()
        replay = device.graph(step)
        experts.resynchronise()
    results: list[Tensor] = []
    for _ in range(2):
        hidden.copy_(residual)
        number = experts.next_number()
        served = run_concurrently(device, replay, functools.partial(server.serve, number, limit_s))
        if not served["done"]:
            experts.mailbox.abort()
            raise WrongResultError(served["text"])
        results.append(hidden.clone())
    if not torch.equal(*results):
        raise WrongResultError("two runs of the same step differ")
    return results


def run_concurrently(device: Device, launch: Callable[[], object], serve: Callable[[], Any]) -> Any:
    """Result of `serve`, while `launch` runs on its own thread: launching may wait for it. Waits for the device."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            with device.active():
                launch()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    served = serve()
    thread.join()
    device.synchronise()
    if failed:
        raise failed[0]
    return served


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖; NaN stays NaN."""
    difference = (ours.double() - reference.double()).norm()
    return float(difference / reference.double().norm())


def within(errors: dict[str, float], limit: float) -> dict[str, Any]:
    """The errors as figures. Raises WrongResultError where one exceeds the limit or is NaN."""
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    if wrong:
        name, error = max(wrong.items(), key=lambda each: each[1])
        raise WrongResultError(
            f"{name} differs from the CPU's result by {error:.2g} (relative); at most {limit:g} was expected"
        )
    return {"relative_error": {name: float(f"{error:.3g}") for name, error in errors.items()}, "limit": limit}
