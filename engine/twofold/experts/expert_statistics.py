"""Files of expert routing counts: our npz, and the `.pt` of SGLang's distribution recorder.

Both hold `logical_count` [buffers, layers, experts]; the buffers' counts are summed. Ours counts MoE layers and names
the model; SGLang's counts every layer of the model, with rows of zeros for those without experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.api.regular_file import open_regular
from twofold.api.whole_file import whole_file
from twofold.experts.npz_file import read_arrays

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_ARRAY: Final = "logical_count"
_MAX_BYTES: Final = 2 << 30
_MAX_TOTAL: Final = 2**53
"""Limit of the sum of all counts: sums of floats are exact up to there."""


def read_statistics(
    path: str | Path,
    layers: int,
    experts: int,
    *,
    moe_layers: Sequence[int] | None = None,
    num_mtp_layers: int = 0,
) -> I64:
    """Counts [layers, experts] of a file; its name ends in .npz or .pt.

    Args:
        layers: MoE layers of the model.
        moe_layers: their indices among the model's layers: a file that counts every layer is accepted too.
        num_mtp_layers: how many of the last are MTP layers. A file recorded without them is accepted;
            each of their experts then counts as often as the mean expert of the other layers.

    Raises:
        ConfigError: the file is missing, broken, or of another model; the message names both shapes.
    """
    path = Path(path)
    _check_name(path)
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes; statistics of at most {_MAX_BYTES} bytes are read")
        found = _read_pt(path) if path.suffix == ".pt" else _read_npz(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; record statistics first, or name another one") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    totals = _totals(path, found, layers, experts)
    if not totals.any():
        raise ConfigError(f"{path}: all counts are zero; record while requests run")
    counts = _of_moe_layers(totals, layers, moe_layers)
    if num_mtp_layers > 0:
        own = layers - num_mtp_layers
        own_counts = _of_moe_layers(totals, own, None if moe_layers is None else moe_layers[:own])
        if own_counts.shape == (own, experts):
            unknown = np.full((num_mtp_layers, experts), own_counts.mean())
            counts = np.concatenate([own_counts, unknown])
    if counts.shape != (layers, experts):
        raise ConfigError(
            f"{path} counts {counts.shape[0]} layers of {counts.shape[1]} experts, the model has {layers} layers of "
            f"{experts}: these are statistics of another model; record this one"
        )
    return np.rint(counts).astype(np.int64)


def write_statistics(
    path: str | Path,
    counts: npt.NDArray[Any],
    *,
    model: str = "",
    moe_layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    **further: npt.NDArray[Any],
) -> None:
    """Write counts [layers, experts] or [buffers, layers, experts] atomically, in the format of the file's extension.

    Args:
        model: name of the counted model, for display.
        moe_layers: with num_layers, a .pt counts all of the model's layers, as SGLang expects it: zeros elsewhere.
        further: arrays added to an npz beside the counts.

    Raises:
        ConfigError: the file cannot be written, or its name ends in neither .npz nor .pt.
    """
    path = Path(path)
    _check_name(path)
    counts = np.asarray(counts, np.int64)
    counts = counts[None] if counts.ndim == 2 else counts
    if counts.ndim != 3:
        raise ConfigError(f"statistics of shape {counts.shape} given, (buffers, layers, experts) expected")
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {_ARRAY: counts, "model": np.array(model), **further}
        _replace(path, lambda file: np.savez_compressed(file, **arrays))
        return
    if moe_layers is not None and num_layers is not None:
        every = np.zeros((len(counts), num_layers, counts.shape[2]), np.int64)
        every[:, list(moe_layers)] = counts
        counts = every
    write_pt(path, {"rank": 0, _ARRAY: counts, "average_utilization_rate_over_window": None})


def write_pt(path: Path, made: dict[str, Any]) -> None:
    """Write a file for `torch.load(weights_only=True)`, atomically: `made` with its arrays as tensors.

    Raises:
        ConfigError: the file cannot be written.
    """
    import torch

    def with_tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, dict):
            return {name: with_tensors(each) for name, each in value.items()}
        return [with_tensors(each) for each in value] if isinstance(value, list) else value

    _replace(path, lambda file: torch.save(with_tensors(made), file))


def _check_name(path: Path) -> None:
    if path.suffix not in (".npz", ".pt"):
        raise ConfigError(f"{path} given; the name of a file of expert statistics ends in .npz or .pt")


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    try:
        with whole_file(path) as part, part.open("wb") as file:
            write(file)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: cannot be written ({error})") from error


def _read_npz(path: Path) -> npt.NDArray[Any]:
    expected = f"expected an npz with {_ARRAY!r} (buffers, layers, experts)"
    return read_arrays(path, (_ARRAY,), expected, needs=_ARRAY)[_ARRAY]


def _read_pt(path: Path) -> npt.NDArray[Any]:
    import torch

    expected = f"expected what SGLang's recorder writes, a dict with the tensor {_ARRAY!r}"
    try:
        # The warning recommends loading pickles.
        with open_regular(path) as file, warnings.catch_warnings(action="ignore"):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch's reader raises many exception types for a foreign file
        raise ConfigError(
            f"{path}: cannot be read: not a .pt file, or it holds objects other than tensors; {expected}"
        ) from error
    found = loaded.get(_ARRAY) if isinstance(loaded, dict) else None
    if not isinstance(found, torch.Tensor):
        keys = ", ".join(map(str, loaded))[:200] if isinstance(loaded, dict) else type(loaded).__name__
        raise ConfigError(f"{path}: holds {keys or 'nothing'}; {expected} (mode stat writes it)")
    if found.is_sparse or found.is_quantized or found.is_complex():
        raise ConfigError(f"{path}: {_ARRAY!r} is not a dense tensor of numbers; {expected}")
    wide = found.double() if found.is_floating_point() else found.long()
    return np.asarray(wide.numpy())


def _totals(path: Path, found: npt.NDArray[Any], layers: int, experts: int) -> F64:
    """Sum over the buffers, [any, any]. Raises ConfigError if it cannot be counts."""
    if found.ndim == 2:
        found = found[None]
    if found.ndim != 3 or found.dtype.kind not in "iuf":
        raise ConfigError(
            f"{path}: {_ARRAY!r} is {found.dtype} of shape {found.shape}; numbers of shape (buffers, {layers}, "
            f"{experts}) were expected"
        )
    with np.errstate(invalid="ignore", over="ignore"):
        totals: F64 = found.sum(axis=0, dtype=np.float64)
        bad = not np.isfinite(totals).all() or bool((found < 0).any()) or totals.sum() > _MAX_TOTAL
    if bad:
        raise ConfigError(
            f"{path}: {_ARRAY!r} holds values that cannot be counts (negative, too large, or not numbers)"
        )
    return totals


def _of_moe_layers(totals: F64, layers: int, moe_layers: Sequence[int] | None) -> F64:
    """Rows of the MoE layers, if `totals` counts every layer of the model; otherwise `totals`."""
    if moe_layers is None or len(totals) == layers or len(totals) <= max(moe_layers, default=-1):
        return totals
    others = np.delete(totals, list(moe_layers), axis=0)
    return totals if others.any() else totals[list(moe_layers)]
