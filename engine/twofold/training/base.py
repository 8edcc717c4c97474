"""A model of transformers whose routed experts stay in Twofold's packed store, in the files' own format.

The dense part is read by the engine's readers, so what the engine serves can be trained, also where the files are
quantised. The experts' parameters of transformers exist by shape alone: they have no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.block_weights import BlockWeights
from twofold.experts.packing import pack_experts
from twofold.models import ModelFiles, open_model_files
from twofold.step.expert_loading import moe_shape
from twofold.training.experts import ExpertLayer

IMPLEMENTATION: Final = "twofold"
"""Name of our experts among transformers' `experts_implementation`s."""
_RENAMED: Final = (".mlp.", ".block_sparse_moe.")
"""Part of a name in transformers' modules, and in the published checkpoints that differ."""


@dataclass(frozen=True)
class BaseModel:
    """An opened base."""

    model: Any
    """transformers' model, in evaluation mode; its routed experts compute with `store`."""
    files: ModelFiles
    store: _core.ExpertStore
    pool: ops.ThreadPool


def open_base(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    torch_device: torch.device | None = None,
    cpu_threads: int = 0,
    keeps: bool = True,
) -> BaseModel:
    """Open a model directory for training.

    Args:
        dtype: of the dense part.
        torch_device: where the dense part lies; None: in host memory.
        cpu_threads: of the experts; 0: one per physical core.
        keeps: see `ExpertLayer`.

    Raises:
        ModelLoadError: the files cannot be read, or transformers' model has a parameter that they lack.
    """
    import transformers

    files, pool = open_model_files(path), ops.ThreadPool(cpu_threads)
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_config(config, dtype=dtype, experts_implementation=IMPLEMENTATION)
    store = pack_experts(moe_shape(files), files.expert_layers(), pool, None)
    for layer, module in enumerate(expert_modules(model)):
        for name, parameter in module.named_parameters(recurse=False):
            # On that device already: moved there, it would be filled.
            shape_alone = torch.zeros((), dtype=dtype, device=torch_device).expand(parameter.shape)
            setattr(module, name, nn.Parameter(shape_alone, requires_grad=False))
        module.twofold_layer = ExpertLayer(pool, store, layer, keeps=keeps)  # type: ignore[assignment]
    _load_dense(model, files, pool, torch_device or torch.device("cpu"))
    return BaseModel(model.eval(), files, store, pool)


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of routed experts, in the order of their layers."""
    return (module for module in model.modules() if hasattr(module, "is_concatenated"))


def _load_dense(model: Any, files: ModelFiles, pool: ops.ThreadPool, device: torch.device) -> None:
    """Give all parameters and buffers that have no memory yet their values."""
    dense = [weights for block, weights in files.parts() if not isinstance(block, ExpertBlock)]
    found = {spec.name: (weights, part) for weights in dense for part, spec in weights.specs.items()}
    for module in model.modules():
        buffers = [name for name, each in module.named_buffers(recurse=False) if each.is_meta]
        for name in buffers:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if buffers:
            model._init_weights(module)  # rotations are computed, not read
    tied = set(model.all_tied_weights_keys)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = found.get(name) or found.get(name.replace(*_RENAMED))
        if place is None:
            if tensor.is_meta and name not in tied:
                raise ModelLoadError(
                    f"{files.tensors.where}: transformers' model has the parameter {name}, which the files lack; it "
                    "cannot be trained here"
                )
            continue
        parent, _, last = name.rpartition(".")
        value = _values(*place, pool).reshape(tensor.shape).to(device, tensor.dtype)
        own = model.get_submodule(parent)
        if last in own._parameters:
            own._parameters[last] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            own._buffers[last] = value
    model.tie_weights()


def _values(weights: BlockWeights, part: str, pool: ops.ThreadPool) -> Tensor:
    """A tensor in float32, as the file has it."""
    spec = weights.specs[part]
    if len(spec.shape) == 2:
        values = ops.dequantise(pool, weights.source.matrix(spec.name, (spec.shape[0], spec.shape[1])))
    else:
        values = np.array(weights.source.vector(spec.name, spec.shape))
    return torch.from_numpy(
        values
    ).clone()  # in torch's memory, aligned to cache lines: see `experts._tensor`
