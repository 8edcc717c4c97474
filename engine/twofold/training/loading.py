"""transformers' `from_pretrained` for MoE models, loading them as `open_base` does. All other models load as before."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from twofold.api.errors import ConfigError, ModelLoadError, TwofoldError
from twofold.training.base import IMPLEMENTATION, open_base
from twofold.weights.checkpoint import INDEX_FILE, SINGLE_FILE

_OF_HUB: Final = ("cache_dir", "force_download", "local_files_only", "token", "revision")
_HONOURED: Final = (
    *_OF_HUB, "config", "dtype", "torch_dtype", "attn_implementation", "experts_implementation", "device_map",
)  # fmt: skip
_WITHOUT_EFFECT: Final = (
    "_from_auto", "_from_pipeline", "_commit_hash", "adapter_kwargs", "ignore_mismatched_sizes",
    "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "offload_state_dict", "proxies",
    "tqdm_class", "trust_remote_code", "use_safetensors", "weights_only", "disable_mmap",
)  # fmt: skip
"""Arguments that say how transformers reads files or where it puts weights: ours stay where the files are mapped."""


def hook_from_pretrained(kind: Any, *, prepare: Callable[[], None]) -> None:
    """Replace `from_pretrained` of transformers' base class `kind`. Safe to call twice.

    prepare: is called before a model is loaded over our experts.
    """
    original = kind.from_pretrained.__func__
    if getattr(original, "opens_base", False):
        return

    @functools.wraps(original)
    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = kwargs.get("experts_implementation")
        if chosen is None:  # the Auto classes put arguments into the configuration
            chosen = getattr(kwargs.get("config"), "_experts_implementation", None)
        if chosen not in (None, IMPLEMENTATION) or not _has_routed_experts(cls, kwargs.get("config"), path):
            return original(cls, path, *args, **kwargs)
        try:
            prepare()
            return _opened(cls, path, args, kwargs)
        # A script of the user goes on with transformers, whatever our readers meet in its files.
        except Exception as error:
            if chosen == IMPLEMENTATION:
                raise
            reason = str(error) if isinstance(error, TwofoldError) else f"{type(error).__name__}: {error}"
            reason = " ".join(reason.split())
            print(f"twofold: {path} is loaded by transformers alone: {reason}", file=sys.stderr, flush=True)
        return original(cls, path, *args, **kwargs)

    from_pretrained.opens_base = True  # type: ignore[attr-defined]
    kind.from_pretrained = classmethod(from_pretrained)


def _has_routed_experts(cls: Any, config: Any, path: Any) -> bool:
    """Whether `cls` is a text model whose experts have an implementation to choose, and there are files to read."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    listed: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    known: Any = getattr(cls, "config_class", None)
    return (
        path is not None
        and known in listed
        and listed[known] is cls
        and bool(cls._can_set_experts_implementation())
        and (config is None or not isinstance(config, known) or _num_experts(config) > 1)
    )


def _num_experts(config: Any) -> int:
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max((value for name in names if isinstance(value := getattr(text, name, None), int)), default=2)


def _opened(cls: Any, path: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """transformers' model over our experts, as `from_pretrained` returns it. Raises TwofoldError."""
    of_hub: dict[str, Any] = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
    further = {name: value for name, value in kwargs.items() if name not in (*_HONOURED, *_WITHOUT_EFFECT)}
    config = kwargs.get("config")
    if not isinstance(config, cls.config_class):
        source = path if config is None else config
        config, further = cls.config_class.from_pretrained(
            source, return_unused_kwargs=True, **of_hub, **further
        )
    else:
        config = copy.deepcopy(config)  # stays as it is for transformers
    unknown = [name for name, value in further.items() if value]
    if args or unknown:
        raise ConfigError(f"{'an argument' if args else unknown[0]} of from_pretrained is given")
    torch_device = _torch_device(kwargs.get("device_map"))
    directory = _directory(path, of_hub)
    settings = {"attn_implementation": kwargs.get("attn_implementation")}
    base = open_base(
        directory,
        dtype=_dtype(kwargs, config),
        torch_device=torch_device,
        config=config,
        settings={name: value for name, value in settings.items() if value is not None},
    )
    model = base.model
    if type(model) is not cls:
        raise ModelLoadError(f"{directory}: transformers loads {type(model).__name__}, not {cls.__name__}")
    model.config.name_or_path = model.name_or_path = str(path)
    _read_generation_config(model, directory)
    model.save_pretrained = _refuse_to_save
    return model


def _directory(path: Any, of_hub: dict[str, Any]) -> Path:
    """The model's files on this machine; a name of the Hugging Face hub is downloaded as transformers would."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import hub

    files: Any = hub
    name, optional = str(path), {"_raise_exceptions_for_missing_entries": False, **of_hub}
    index = files.cached_file(name, INDEX_FILE, **optional)
    if index is None:
        files.cached_file(name, SINGLE_FILE, **of_hub)
    else:
        files.get_checkpoint_shard_files(name, index, **of_hub)
    files.cached_file(name, "generation_config.json", **optional)
    return Path(str(files.cached_file(name, "config.json", **of_hub))).parent


def _dtype(kwargs: dict[str, Any], config: Any) -> torch.dtype:
    """That of the dense part."""
    given = kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto"
    if given == "auto":
        text = config.get_text_config()
        given = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    found = getattr(torch, given) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype is {given!r}; one dtype for the whole model is taken")
    return found


def _read_generation_config(model: Any, directory: Path) -> None:
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)


def _torch_device(device_map: Any) -> torch.device | None:
    """Where the dense part goes; None: it stays in host memory. Raises ConfigError for several devices."""
    places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
    if len(places) != 1:
        raise ConfigError(f"device_map is {device_map!r}; the dense part goes to one device")
    (place,) = places
    if place in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return None if place is None else torch.device(place)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "the base model stays as it is stored, so save_pretrained of it is refused; save the PEFT adapter, and merge "
        "it with `twofold merge`"
    )
