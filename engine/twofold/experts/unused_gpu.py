"""Finds out whether this machine has an NVIDIA GPU, and says why this installation does not use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from twofold.experts.accelerator import AcceleratorChoice

_DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_LISTING_TIMEOUT_S: Final = 30


def has_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU; false if CUDA_VISIBLE_DEVICES hides all of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            listing = subprocess.run(  # noqa: S603
                [program, "-L"], capture_output=True, text=True, timeout=_LISTING_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return listing.returncode == 0 and "GPU 0" in listing.stdout
    return _DRIVER_GPUS.is_dir() and any(_DRIVER_GPUS.iterdir())


def no_accelerator(missing: str) -> AcceleratorChoice:
    """The choice of the CPU alone. missing: why no GPU is used and what to do, for a machine that has one."""
    return not_used(missing) if has_gpu() else AcceleratorChoice("none", missing)


def not_used(why: str) -> AcceleratorChoice:
    """The choice of the CPU alone on a machine with a GPU. why: the reason, with what to do."""
    return AcceleratorChoice("none", f"this GPU is not used, because {why}", unused_gpu=True)


def no_device_found(why: str) -> str:
    """Text for a CUDA module that finds no device. why: the module's reason, with what to do."""
    if not has_gpu():
        return "no CUDA device was found"
    return f"no CUDA device was found: {why}"


def without_torch_cuda(torch_version: str, torch_cuda: str | None) -> str:
    """Text for a PyTorch that finds no CUDA device where the CUDA module finds one."""
    if torch_cuda is None:
        return f"torch {torch_version} does not use CUDA; install one that does"
    return (
        f"torch {torch_version} for CUDA {torch_cuda} does not work with this driver; update the NVIDIA driver, or "
        "install a torch for an older CUDA"
    )
