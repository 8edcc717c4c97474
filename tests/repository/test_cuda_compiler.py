"""`scripts/cuda_compiler.py`: the search for nvcc, its trial, and the fetch from the Python package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.sourced_build_steps import ROOT, sourced

SCRIPT = ROOT / "scripts/cuda_compiler.py"
RELEASE = "echo 'Cuda compilation tools, release {version}, V{version}.88'"
GPU = 'case "$*" in -L) echo "GPU 0: a card";; *compute_cap*) echo {capability};; esac'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def nvcc(folder: Path, version: str = "13.0", fault: str = "") -> Path:
    """An nvcc that says `fault` to everything but --version, or else succeeds."""
    trial = f'echo "{fault}" >&2; exit 1' if fault else "exit 0"
    text = f'[ "$1" = --version ] || {{ {trial}; }}\n{RELEASE.format(version=version)}'
    return program(folder / "bin/nvcc", text)


def fake_pip(folder: Path, *, works: bool = True) -> None:
    """A pip that plans one package of 104 MB and unpacks an nvcc with its runtime library."""
    wheel = folder / "nvcc.whl"
    (folder / "pip").mkdir(parents=True)
    with wheel.open("wb") as file:
        file.truncate(104_000_000)  # a hole, no bytes
    install = [{"metadata": {"name": "nvcc", "version": "1"}, "download_info": {"url": wheel.as_uri()}}]
    (folder / "pip/__init__.py").touch()
    (folder / "pip/__main__.py").write_text(
        "import pathlib, sys\n"
        f"with open({str(folder / 'requested')!r}, 'a') as log: print(*sys.argv[1:], file=log)\n"
        f"if not {works}: sys.exit('ERROR: no route to the index')\n"
        "after = lambda name: pathlib.Path(sys.argv[sys.argv.index(name) + 1])\n"
        "if '--report' in sys.argv:\n"
        f"    after('--report').write_text({json.dumps({'install': install})!r})\n"
        "else:\n"
        "    root = after('--target') / 'nvidia/cu13'\n"
        "    for name in ('bin/nvcc', 'lib/libcudart.so.13'):\n"
        "        (root / name).parent.mkdir(parents=True)\n"
        "        (root / name).write_text('new')\n"
    )


def call(
    *arguments: str | Path, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with the system's own programs and `path`, and without the CUDA of this machine."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "PIP_"))}
    plain |= {"CUDA_HOME": "/nowhere", "PATH": f"{path or '/nowhere'}:/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, env=plain | environment, capture_output=True, text=True, check=False, timeout=60
    )


def found(*arguments: str, **environment: str) -> dict[str, object]:
    done = call("find", "--cuda=", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        pytest.param(
            "error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!",
            "CXX=g++-14",
            id="too-new-gcc",
        ),
        pytest.param("collect2: error: ld returned 127", "mend the linker", id="broken-linker"),
        pytest.param(
            "/usr/bin/ld: cannot find -lcudart_static", "toolkit (12.4 or newer) whole", id="no-runtime"
        ),
        pytest.param(
            "fatal error: cuda_bf16.h: No such file", "toolkit (12.4 or newer) whole", id="no-headers"
        ),
        pytest.param("nvcc fatal: Unsupported gpu architecture", "knows this GPU", id="unknown-gpu"),
    ],
)
def test_a_compiler_that_cannot_build_is_named_with_its_message(
    tmp_path: Path, fault: str, remedy: str
) -> None:
    compiler = nvcc(tmp_path, fault=fault)
    says = found("--without-gpu", "--host-compiler=g++-99", CUDA_HOME=str(tmp_path))
    assert says["problem"] == f"{compiler} (CUDA 13.0) cannot build with g++-99: {fault}"
    assert remedy in str(says["remedy"])
    # A compiler that built before is trusted: its trial takes seconds and would run in every build.
    assert not found("--without-gpu", f"--trusted={compiler}", CUDA_HOME=str(tmp_path))["problem"]


@pytest.mark.parametrize(
    ("capability", "problem", "architectures"),
    [
        ("8.6", "", "86-real"),
        ("8.6\n12.0\n8.6", "", "86-real;120-real"),
        ("6.1\n8.9", "", "89-real"),
        ("7.5", "the GPU's compute capability is 7.5; the kernels need 8.0", ""),
        ("", "nvidia-smi lists no GPU", ""),
    ],
)
def test_architectures_are_those_of_the_gpus(
    tmp_path: Path, capability: str, problem: str, architectures: str
) -> None:
    nvcc(tmp_path)
    program(tmp_path / "smi/nvidia-smi", GPU.format(capability=f"'{capability}'"))
    done = call("find", path=tmp_path / "smi", CUDA_HOME=str(tmp_path))
    says = json.loads(done.stdout)
    assert (says["problem"], says["architectures"]) == (problem, architectures)
    assert says["gpu"] == bool(architectures)


def test_fetching_leaves_a_root_that_cmake_understands(tmp_path: Path) -> None:
    fake_pip(tmp_path / "site")
    folder = tmp_path / "two words"
    (folder / "nvidia/cu13/old").mkdir(parents=True)
    done = call("fetch", folder, "--cuda=13.2", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "CUDA 13.2 compiler: 1 packages, 104 MB" in done.stdout
    root = Path(done.stdout.splitlines()[-1])
    assert root == folder / "nvidia/cu13"
    assert (root / "lib64/libcudart.so").read_text() == "new"
    assert not (root / "old").exists()
    assert not folder.with_name("two words.part").exists()
    for requested in (tmp_path / "site/requested").read_text().splitlines():
        assert requested.endswith("cuda-toolkit[nvcc,crt,nvvm,cccl,cudart]==13.2.*")


def test_a_failed_fetch_ends_in_one_line_and_keeps_what_was_there(tmp_path: Path) -> None:
    fake_pip(tmp_path / "site", works=False)
    earlier = nvcc(tmp_path / "cuda/nvidia/cu13")
    done = call("fetch", tmp_path / "cuda", "--cuda=13.0", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 1
    assert done.stdout.startswith("pip could not fetch the CUDA 13.0 compiler (see above); ")
    assert "Traceback" not in done.stderr
    assert earlier.exists()


@pytest.mark.parametrize(
    ("version", "torch", "says", "fetched"),
    [
        pytest.param("13.0", "13.2", "fits (CUDA 13.0)", "", id="fits"),
        pytest.param("11.8", "13.0", "is CUDA 11.8, older than 12.4: fetching", "13.0", id="too-old"),
        pytest.param(
            "12.8", "13.2", "is CUDA 12.8 and PyTorch's is 13.2: fetching", "13.2", id="other-major"
        ),
        pytest.param("12.8", "", "fits (CUDA 12.8)", "", id="torch-without-cuda"),
        pytest.param("13.0", "12.6", "the Python package index has no nvcc for CUDA 12.6", "", id="cuda-12"),
        pytest.param("", "", "nvcc is neither on PATH nor under CUDA_HOME: fetching", "13.0", id="none"),
    ],
)
def test_a_compiler_is_fetched_where_none_fits(
    tmp_path: Path, version: str, torch: str, says: str, fetched: str
) -> None:
    fake_pip(tmp_path / "site")
    if version:
        nvcc(tmp_path / "toolkit", version)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "CUDA_HOME": str(tmp_path / "toolkit")}
    done = call("ready", tmp_path / "cuda", f"--cuda={torch}", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
    assert (tmp_path / "cuda").exists() == bool(fetched)
    assert not fetched or f"=={fetched}.*" in (tmp_path / "site/requested").read_text()


@pytest.mark.parametrize("wanted", ["AUTO", "ON"])
def test_without_a_compiler_and_a_network_only_cuda_on_ends_set_up(tmp_path: Path, wanted: str) -> None:
    fake_pip(tmp_path / "site", works=False)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    done = sourced(
        f"LOG_DIR={tmp_path}; run_step 'Find a CUDA compiler' ready_cuda_compiler",
        TWOFOLD_VENV=str(tmp_path / "venv"),
        TWOFOLD_CUDA=wanted,
        PYTHONPATH=str(tmp_path / "site"),
        CUDA_HOME="/nowhere",
    )
    assert done.returncode == (1 if wanted == "ON" else 0)
    if wanted == "ON":
        last = done.stderr.rstrip().splitlines()
        assert any(
            "TWOFOLD_CUDA=ON: there is no CUDA compiler, and none could be fetched" in line for line in last
        )
    else:
        assert "going on without CUDA" in done.stdout


def test_a_gpu_that_was_added_makes_set_up_install_again(tmp_path: Path) -> None:
    """PyTorch's CPU build is then replaced by the one with CUDA."""
    version = tmp_path / "venv/lib/python3.11/site-packages/torch/version.py"
    version.parent.mkdir(parents=True)
    program(tmp_path / "venv/bin/python", f'echo "$*" >>{tmp_path}/asked')
    smi = program(tmp_path / "bin/nvidia-smi", "exit 9")
    fingerprints, requested = [], []
    for listing, cuda in (("exit 9", "None"), ("exit 0", "None"), ("exit 0", "'13.0'")):
        smi.write_text(f"#!/bin/sh\n{listing}\n")
        version.write_text(f"cuda: Optional[str] = {cuda}\n")
        done = sourced(
            "BASE_PYTHON=true; installation_fingerprint; install_torch",
            TWOFOLD_VENV=str(tmp_path / "venv"),
            TWOFOLD_CUDA="AUTO",
            PATH=f"{smi.parent}:{os.environ['PATH']}",
        )
        assert done.returncode == 0, done.stderr
        fingerprints.append(done.stdout.splitlines()[0])
        requested.append((tmp_path / "asked").read_text().splitlines()[-1])
    assert fingerprints[0] != fingerprints[1]
    assert fingerprints[1] == fingerprints[2]
    assert ["--force-reinstall" in command for command in requested] == [False, True, False]
