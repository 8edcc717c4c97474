"""Prints PyTorch's download size before it is installed, and whether it includes unneeded CUDA libraries.

    .venv/bin/python scripts/torch_sizes.py [--no-cuda] PIP_ARGUMENT…

Asks pip what it would install with those arguments, and the index for the sizes. `--no-cuda`: this machine does not
use CUDA. Exit code 3: pip would install CUDA libraries all the same, because its index has no other build.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CUDA_PREFIXES = ("nvidia-", "cuda-", "triton")
"""Prefixes of packages that only a CUDA build depends on."""
HAS_USELESS_CUDA = 3


@dataclass(frozen=True)
class Download:
    name: str
    version: str
    num_bytes: int | None
    """None if the index does not report it."""

    @property
    def of_cuda(self) -> bool:
        return self.name.lower().startswith(CUDA_PREFIXES)


def size_of(url: str) -> int | None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        return path.stat().st_size if path.is_file() else None
    if parts.scheme != "https":
        return None
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 - https by the line above
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):
        return None
    return int(length) if length else None


def planned(pip_arguments: list[str]) -> list[Download]:
    """pip's planned downloads. Raises CalledProcessError if pip fails; pip has printed why."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--quiet",
            "--dry-run",
        ]
        subprocess.run([*command, "--report", str(report), *pip_arguments], check=True)
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    urls = [package["download_info"]["url"] for package in packages]
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(size_of, urls))
    return [
        Download(package["metadata"]["name"], package["metadata"]["version"], size)
        for package, size in zip(packages, sizes, strict=True)
    ]


def total(downloads: list[Download]) -> str:
    """Summary such as "12 packages, 2.7 GB" or "6 packages, 104 MB", "at least" if a size is unknown."""
    known = sum(download.num_bytes or 0 for download in downloads)
    least = "" if all(download.num_bytes is not None for download in downloads) else "at least "
    size = f"{known / 1e9:.1f} GB" if known >= 1e9 else f"{known / 1e6:.0f} MB"
    return f"{len(downloads)} packages, {least}{size}"


def advice(downloads: list[Download], no_cuda: bool) -> list[str]:
    """The lines to print."""
    if not downloads:
        return ["PyTorch is there"]
    lines = [f"to download for PyTorch: {total(downloads)}"]
    cuda = [download for download in downloads if download.of_cuda]
    if cuda:
        lines.append(f"  of that CUDA libraries: {total(cuda)}, beside PyTorch's own CUDA half")
    if cuda and no_cuda:
        lines += [
            "  This machine does not use them (TWOFOLD_CUDA=OFF, or no GPU found), but this index has no other build.",
            "  PyTorch's CPU build takes about 0.2 GB and comes from PyTorch's own CPU index: uv, which knows it, is",
            "  asked for it first. (TWOFOLD_TORCH_INDEX=ADDRESS names another index of CPU builds.)",
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-cuda", action="store_true", help="this machine does not use CUDA")
    options, pip_arguments = parser.parse_known_args()
    try:
        downloads = planned(pip_arguments)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    print("\n".join(advice(downloads, options.no_cuda)))
    has_cuda = any(download.of_cuda for download in downloads)
    return HAS_USELESS_CUDA if has_cuda and options.no_cuda else 0


if __name__ == "__main__":
    sys.exit(main())
