"""A model of transformers whose routed experts stay in Twofold's packed store, in the files' own format.

The dense part is read by the engine's readers, so what the engine serves can be trained, also where the files are
quantised. The experts' parameters of transformers exist by shape alone: they have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.experts.packing import pack_experts
from twofold.models import ModelFiles, open_model_files
from twofold.step.expert_loading import moe_shape
from twofold.training.dense_tensors import DenseTensors
from twofold.training.experts import ExpertLayer
from twofold.training.stacked_factors import experts_of_scaled_rows
from twofold.weights.gguf_file import is_gguf

IMPLEMENTATION: Final = "twofold"
"""Name of our experts among transformers' `experts_implementation`s."""
_EVERY_EXPERT: Final = "Llama4TextExperts"
"""transformers' class that lets every expert compute every token, so it has no implementation to choose."""


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
    config: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> BaseModel:
    """Open a model directory, or a GGUF file, for training.

    Args:
        dtype: of the dense part.
        torch_device: where the dense part lies; None: in host memory.
        cpu_threads: of the experts; 0: one per physical core.
        keeps: see `ExpertLayer`.
        config: transformers' configuration, or the directory of its config.json; None: the model directory's. A GGUF
            file needs one.
        settings: further arguments of transformers' `from_config`, as `attn_implementation`.

    Raises:
        ModelLoadError: the files cannot be read, or transformers' model has a parameter that they lack.
    """
    import transformers

    files, pool = open_model_files(path), ops.ThreadPool(cpu_threads)
    if config is None and is_gguf(path):
        raise ModelLoadError(
            f"{path}: a GGUF file has no configuration of transformers; give the directory of the model's config.json"
        )
    if config is None or isinstance(config, str | Path):
        config = transformers.AutoConfig.from_pretrained(config or path)
    model = shape_alone(config, dtype=dtype, **(settings or {}))
    modules = list(expert_modules(model))
    if len(modules) != len(files.config.moe_layers):
        raise ModelLoadError(
            f"{files.tensors.where}: transformers' {type(model).__name__} has {len(modules)} modules of routed experts "
            f"whose implementation can be chosen, for {len(files.config.moe_layers)} MoE layers; it cannot be trained"
        )
    store = pack_experts(moe_shape(files), files.expert_layers(), pool, None)
    for layer, module in enumerate(modules):
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, _without_memory(parameter, torch_device))
        module._apply = MethodType(_apply_to_zeros, module)  # type: ignore[method-assign]
        module.twofold_layer = ExpertLayer(pool, store, layer, keeps=keeps)  # type: ignore[assignment]
        if type(module).__name__ == _EVERY_EXPERT:
            module.forward = MethodType(experts_of_scaled_rows, module)
        else:
            module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    _load_dense(model, files, pool, torch_device or torch.device("cpu"))
    return BaseModel(model.eval(), files, store, pool)


def shape_alone(config: Any, **settings: Any) -> Any:
    """transformers' model of a configuration, without memory. settings: as of `from_config`.

    Raises ModelLoadError if transformers has none that predicts text.
    """
    import transformers

    kinds: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    for kind in kinds:
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                # Some releases of transformers let only their own names of implementations pass here.
                return kind.from_config(config, experts_implementation="eager", **settings)
    raise ModelLoadError(
        f"transformers {transformers.__version__} has no text model for {config.model_type}, so it cannot be trained"
    )


def _without_memory(parameter: Tensor, device: torch.device | None) -> nn.Parameter:
    """A frozen parameter of the same shape that holds one zero."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)


def _apply_to_zeros(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which moves and converts a module: torch would fill the memory of each parameter."""
    for name, parameter in module.named_parameters(recurse=False):
        zero = change(parameter.detach()[(0,) * parameter.dim()])
        setattr(module, name, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
    return module


def text_names(model: Any) -> Callable[[str], bool]:
    """Whether a module or parameter takes part in predicting text, by its name; encoders of images do not."""
    decoder = next((name for name, module in model.named_modules() if module is model.get_decoder()), "")
    inside = (f"{decoder}.", "lm_head")
    return lambda name: not decoder or name == decoder or name.startswith(inside)


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of routed experts, in the order of their layers."""
    return (
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") or type(module).__name__ == _EVERY_EXPERT
    )


def _load_dense(model: Any, files: ModelFiles, pool: ops.ThreadPool, device: torch.device) -> None:
    """Give all parameters and buffers that have no memory yet their values."""
    dense = DenseTensors(model, files, pool)
    tied, is_of_text = set(model.all_tied_weights_keys), text_names(model)
    for path, module in model.named_modules():
        buffers = [name for name, each in module.named_buffers(recurse=False) if each.is_meta]
        for name in buffers:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device=device)
        if buffers and is_of_text(path):
            model.get_decoder()._init_weights(module)  # rotations are computed, not read
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parent, _, last = name.rpartition(".")
        own = model.get_submodule(parent)
        if tensor.is_meta and not is_of_text(name) and last in own._parameters:
            own._parameters[last] = _without_memory(tensor, device)
            continue
        value = dense.read(name, tuple(tensor.shape))
        if value is None:
            if tensor.is_meta and name not in tied:
                raise ModelLoadError(
                    f"{files.tensors.where}: transformers' model has the parameter {name}, which the files lack; it "
                    "cannot be trained here"
                )
            continue
        value = value.to(device, tensor.dtype)
        if last in own._parameters:
            own._parameters[last] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            own._buffers[last] = value
    model.tie_weights()
