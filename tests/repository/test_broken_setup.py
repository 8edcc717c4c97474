"""`make run` on a machine with one fault: it fails at once and names the fault and the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pip
import pytest

from tests.repository.sourced_build_steps import ROOT, sourced

MAKE_RUN = ("make", "run")
NAMESPACE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
"""Starts a command whose mounts end with it."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fresh checkout's files of the set-up: nothing is installed or compiled in it."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(folder: Path, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` in a checkout, with pip's index on a closed port, so that no fault can end in a download."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TWOFOLD_", "PIP_", "MAKE", "MFLAGS")) and name != "CXX"
    }
    no_index = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://127.0.0.1:9/simple",
        "PIP_RETRIES": "1",
        "PYTHON": sys.executable,
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=plain | no_index | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def on_mount(script: str, *words: str) -> tuple[str, ...]:
    """`script`, which may mount, then `make run`. Skips where this user may not mount."""
    probe = subprocess.run(
        [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip("this user may not mount, not even in a namespace")
    return (*NAMESPACE, "sh", "-c", f'{script}; cd "$1"; shift; exec "$@"', "-", *words)


def test_without_a_compiler_the_package_is_named(checkout: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if "++" not in program.name and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    done = run(checkout, MAKE_RUN, PATH=str(programs))
    assert done.returncode != 0
    assert "  - a C++ compiler that knows C++20 (g++; GCC 11 or newer)\n" in done.stderr
    assert "sudo apt-get install -y g++\n" in done.stderr
    assert "g++" in (checkout / "build/logs/prerequisites.log").read_text()
    assert not (checkout / ".venv").exists()


def test_without_a_network_the_step_names_it(checkout: Path) -> None:
    """With a virtual environment that has pip, to save its making."""
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    done = run(checkout, MAKE_RUN)
    assert done.returncode != 0
    assert "FAILED" in done.stderr
    assert ": Install build tools\n" in done.stderr
    assert "cause:   no network: pip could not reach its package index" in done.stderr
    assert "then\n  run the same command again" in done.stderr


def test_too_small_a_disk_is_refused_before_anything_is_installed(checkout: Path) -> None:
    small = 'mkdir "$1/disk"; mount -t tmpfs -o size=64m none "$1/disk"'
    done = run(checkout, on_mount(small, str(checkout), *MAKE_RUN), TWOFOLD_VENV=f"{checkout}/disk/venv")
    assert done.returncode != 0
    assert f"GB; 64 MB are free in {checkout}/disk/venv" in done.stderr
    assert "TWOFOLD_VENV" in done.stderr
    assert "==>" not in done.stdout


def test_a_disk_that_fills_up_is_named_with_the_step(tmp_path: Path) -> None:
    small = f'mount -t tmpfs -o size=8m none "{tmp_path}"'
    steps = f"source scripts/build_steps.sh; BASE_PYTHON={sys.executable}; run_step 'Make it' create_venv"
    folders = {"TWOFOLD_VENV": f"{tmp_path}/venv", "TWOFOLD_BUILD_DIR": f"{tmp_path}/build"}
    done = run(ROOT, on_mount(small, str(ROOT), "bash", "-c", steps), **folders)
    assert done.returncode != 0
    assert ": Make it\n" in done.stderr
    assert "cause:   the disk is full" in done.stderr


def test_a_checkout_that_cannot_be_written_is_named_with_the_folders_to_set(checkout: Path) -> None:
    read_only = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"'
    done = run(checkout, on_mount(read_only, str(checkout), *MAKE_RUN))
    assert done.returncode != 0
    assert f"cannot write to {checkout}" in done.stderr
    for name in ("TWOFOLD_VENV=", "TWOFOLD_BUILD_DIR=", "TWOFOLD_TELEMETRY_URL="):
        assert name in done.stderr


@pytest.mark.parametrize(
    ("nvcc", "printed"),
    [
        pytest.param(
            "echo 'Cuda compilation tools, release 11.8, V11.8.89'",
            "is CUDA 11.8, older than 12.4",
            id="too-old",
        ),
        pytest.param("exit 127", "does not run", id="broken"),
    ],
)
def test_a_wrong_cuda_is_named_with_its_path(tmp_path: Path, nvcc: str, printed: str) -> None:
    """Through the step of `make run`, with the real CMake files; they end before a file is compiled."""
    compiler = tmp_path / "cuda/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
    compiler.chmod(0o755)
    done = sourced(
        "run_step 'Compile the native modules' build_native run",
        TWOFOLD_VENV=sys.prefix,
        TWOFOLD_BUILD_DIR=str(tmp_path / "build"),
        TWOFOLD_CUDA="ON",
        CUDA_HOME=str(tmp_path / "cuda"),
        PATH=f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
    )
    text = " ".join(done.stderr.replace("|", " ").split())
    assert done.returncode != 0
    assert f"TWOFOLD_CUDA=ON: {compiler}" in text
    assert printed in text
    assert "install the CUDA toolkit (12.4 or newer), or use TWOFOLD_CUDA=AUTO" in text
