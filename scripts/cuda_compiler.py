"""Finds a CUDA compiler that can build Twofold, or fetches one from the Python package index; needs no root.

    python scripts/cuda_compiler.py find [OPTION…]               one JSON object for cmake/Cuda.cmake
    python scripts/cuda_compiler.py ready FOLDER                 a fitting compiler: one that is here, else fetch it
    python scripts/cuda_compiler.py fetch FOLDER [--cuda 13.0]   fetch it anyway; the last line is the CUDA root

Searched places: CUDA_HOME or CUDA_PATH and no other if one is set, else PATH and /usr/local/cuda; then the folder
`cuda` of the virtual environment whose Python runs this. A compiler fits if it is new enough and builds and links a
small kernel for this machine's GPUs. Standard library and pip only. Exit code 1: none could be fetched; the last line
says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from torch_sizes import planned, total

MIN_NVCC = (12, 4)
MIN_CAPABILITY = 80
"""cp.async, which the kernels of grouped products use."""
TRIAL_TIMEOUT_S = 600
"""Longer than six architectures take on a busy machine."""
ARCHITECTURE_WITHOUT_GPU = "90"
DEFAULT_CUDA = "13.0"
"""Version to fetch if PyTorch does not name one."""
FIRST_CUDA_OF_THE_INDEX = 13
"""The packages of CUDA 12 hold ptxas, but no nvcc."""
PARTS = "nvcc,crt,nvvm,cccl,cudart"
"""cudart: the static runtime, in the compiler's own version; nvcc alone asks for any version of it."""
TRIAL = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
__global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }
int launch(float* x) {
  add_one<<<1, 32>>>(x);
  return static_cast<int>(cudaGetLastError());
}
"""
TOOLKIT = "install the CUDA toolkit (12.4 or newer)"
FETCH = f"run `make build PROFILE=run` with a network, which fetches the compiler, or {TOOLKIT}"
REMEDIES = (
    (r"unsupported (?:GNU|clang) version", "name an older C++ compiler: `CXX=g++-14 make run`"),
    (r"nsupported gpu architecture", "install a CUDA toolkit that knows this GPU"),
    (
        r"cannot open source file|error: .*\.h: No such file|cannot find -lcud",
        f"{TOOLKIT} whole, or hide this one: `CUDA_HOME=none make build`",
    ),
    (r"\bld\b|collect2", "mend the linker"),
)
"""(pattern of a compiler's message, what to do about it)."""


class FetchError(Exception):
    """No compiler could be fetched; the text says why and what to do."""


@dataclass(frozen=True)
class Wanted:
    """Requirements on a compiler."""

    host_compiler: str = "g++"
    cuda: str = ""
    """PyTorch's CUDA version, like "13.0"; "" without one."""
    architectures: str = ""
    """In CMake's form, like "80-real;90"; "" for nvcc's default."""
    trusted: str = ""
    """An nvcc that built before, whose trial is not repeated."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc, and the problem that keeps it from building; `nvcc` is empty if none was found."""

    nvcc: str
    version: str = ""
    problem: str = ""
    remedy: str = ""

    def fits_torch(self, cuda: str) -> bool:
        """Whether this has the major version of PyTorch's CUDA; true for a PyTorch without CUDA."""
        return not cuda or self.version.partition(".")[0] == cuda.partition(".")[0]


@dataclass(frozen=True)
class Finding(Compiler):
    """The answer for cmake/Cuda.cmake."""

    architectures: str = ""
    gpu: bool = field(default=False)
    """Whether this machine has a GPU that the kernels run on."""


def capabilities() -> list[int]:
    """Compute capabilities of this machine's GPUs as nvidia-smi lists them, like 89; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    printed = run([program, "--query-gpu=compute_cap", "--format=csv,noheader"])
    found = re.findall(r"^(\d+)\.(\d+)\s*$", printed.stdout, re.MULTILINE) if printed.returncode == 0 else []
    return sorted({int(major + minor) for major, minor in found})


def places() -> list[Path]:
    """Existing nvcc programs, in the order of preference."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        found = [Path(named) / "bin/nvcc"]
    else:
        on_path = shutil.which("nvcc")
        found = [*([Path(on_path)] if on_path else []), Path("/usr/local/cuda/bin/nvcc")]
    found += fetched(Path(sys.prefix) / "cuda")
    return list(dict.fromkeys(path for path in found if path.is_file()))


def fetched(folder: Path) -> list[Path]:
    """The nvcc that an earlier fetch put into `folder`; empty without one."""
    return sorted(folder.glob("nvidia/cu*/bin/nvcc"))


def torch_cuda() -> str:
    """CUDA version of this Python's PyTorch, like "13.0"; "" without PyTorch or CUDA. Does not import PyTorch."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    version = Path(folders[0]) / "version.py" if folders else None
    if version is None or not version.is_file():
        return ""
    match = re.search(r"^cuda\b.*= '(\d+\.\d+)", version.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def check(nvcc: Path, wanted: Wanted) -> Compiler:
    """The compiler at this path, with its problem if it is too old or cannot build a small kernel."""
    printed = run([str(nvcc), "--version"])
    release = re.search(r"release (\d+)\.(\d+)", printed.stdout)
    if printed.returncode or release is None:
        return Compiler(str(nvcc), "", f"{nvcc} does not run", FETCH)
    found = Compiler(str(nvcc), f"{release[1]}.{release[2]}")
    if (int(release[1]), int(release[2])) < MIN_NVCC:
        return replace(found, problem=f"{nvcc} is CUDA {found.version}, older than 12.4", remedy=FETCH)
    if str(nvcc) == wanted.trusted:
        return found
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "trial.cu"
        source.write_text(TRIAL, encoding="utf-8")
        options = [
            "-std=c++20",
            "-shared",
            "-Xcompiler=-fPIC",
            "-cudart=static",
            f"-ccbin={wanted.host_compiler}",
        ]
        numbers = re.findall(r"\d+[af]?", wanted.architectures)
        options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
        tried = run([str(nvcc), *options, str(source), "-o", str(Path(folder) / "trial.so")])
    if tried.returncode == 0:
        return found
    message = first_error(f"{tried.stdout}\n{tried.stderr}")
    remedy = next((do for pattern, do in REMEDIES if re.search(pattern, message)), FETCH)
    problem = f"{nvcc} (CUDA {found.version}) cannot build with {wanted.host_compiler}: {message}"
    return replace(found, problem=problem, remedy=remedy)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"error: no end within {TRIAL_TIMEOUT_S} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = (line for line in lines if re.search(r"error|nsupported|cannot find|No such file", line))
    return next(telling, lines[0] if lines else "it printed nothing")[:300]


def find_compiler(wanted: Wanted) -> Compiler:
    """The best compiler of this machine: one of PyTorch's CUDA major version, else one that builds, else a problem."""
    checked = [check(path, wanted) for path in places()]
    fitting = [compiler for compiler in checked if not compiler.problem]
    same = [compiler for compiler in fitting if compiler.fits_torch(wanted.cuda)]
    missing = Compiler("", problem="nvcc is neither on PATH nor under CUDA_HOME", remedy=FETCH)
    return next(iter([*same, *fitting, *checked]), missing)


def find(wanted: Wanted, *, without_gpu: bool) -> Finding:
    """The compiler and the architectures to build for. without_gpu: compile on a machine without a GPU too."""
    found = capabilities()
    usable = [each for each in found if each >= MIN_CAPABILITY]
    if not usable and not without_gpu:
        problem, remedy = (
            "nvidia-smi lists no GPU",
            "build it again once nvidia-smi does",
        )
        if found:
            problem = (
                f"the GPU's compute capability is {max(found) / 10}; the kernels need {MIN_CAPABILITY / 10}"
            )
            remedy = "use --accelerator none"
        return Finding("", problem=problem, remedy=remedy)
    numbers = ";".join(f"{each}-real" for each in usable) or ARCHITECTURE_WITHOUT_GPU
    wanted = replace(wanted, architectures=wanted.architectures or numbers)
    compiler = find_compiler(wanted)
    return Finding(**asdict(compiler), architectures=wanted.architectures, gpu=bool(usable))


def fetch(folder: Path, cuda: str) -> Path:
    """Fetch the compiler of a CUDA version into `folder`, replacing what is there, and return the CUDA root.

    Raises:
        FetchError: the index has no such compiler, or cannot be reached.
    """
    if int(cuda.partition(".")[0]) < FIRST_CUDA_OF_THE_INDEX:
        raise FetchError(
            f"the Python package index has no nvcc for CUDA {cuda}; {TOOLKIT}, or a PyTorch for CUDA "
            f"{FIRST_CUDA_OF_THE_INDEX} or newer"
        )
    packages = ["--ignore-installed", f"cuda-toolkit[{PARTS}]=={cuda}.*"]
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        print(f"to download for the CUDA {cuda} compiler: {total(planned(packages))}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--target", str(part), *packages], check=True)
    except subprocess.CalledProcessError as error:
        raise FetchError(f"pip could not fetch the CUDA {cuda} compiler (see above); {FETCH}") from error
    if not fetched(part):
        raise FetchError(f"the packages of CUDA {cuda} hold no nvcc; {TOOLKIT}")
    link_libraries(fetched(part)[0].parent.parent)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"the CUDA {cuda} compiler takes {size / 1e6:.0f} MB in {folder}", flush=True)
    return fetched(folder)[0].parent.parent


def link_libraries(root: Path) -> None:
    """Give the libraries the names by which nvcc and CMake look for them."""
    (root / "lib64").symlink_to("lib")
    for library in root.glob("lib/libcudart.so.*"):
        (root / "lib/libcudart.so").symlink_to(library.name)


def ready(folder: Path, wanted: Wanted) -> None:
    """Say which compiler of this machine fits; fetch one into `folder` if none does. Raises FetchError."""
    found = find(wanted, without_gpu=True)
    if not found.problem and found.fits_torch(wanted.cuda):
        print(f"{found.nvcc} fits (CUDA {found.version})")
        return
    reason = found.problem or f"{found.nvcc} is CUDA {found.version} and PyTorch's is {wanted.cuda}"
    print(f"{reason}: fetching a compiler", flush=True)
    try:
        fetch(folder, wanted.cuda or DEFAULT_CUDA)
    except FetchError as error:
        if found.problem:
            raise
        print(f"{error}\ngoing on with {found.nvcc}")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("find", "ready", "fetch"))
    parser.add_argument("folder", nargs="?", type=Path, help="where the compiler goes")
    parser.add_argument("--cuda", default=torch_cuda(), help="CUDA version; default: PyTorch's")
    parser.add_argument("--host-compiler", default=os.environ.get("CXX") or "g++")
    parser.add_argument(
        "--architectures", default="", help="as 80-real,90; default: those of this machine's GPUs"
    )
    parser.add_argument("--without-gpu", action="store_true", help="compile on a machine without a GPU too")
    parser.add_argument("--trusted", default="", help="nvcc whose trial is not repeated")
    options = parser.parse_args(None if arguments is None else list(arguments))
    wanted = Wanted(
        host_compiler=options.host_compiler,
        cuda=options.cuda,
        architectures=options.architectures.replace(",", ";"),
        trusted=options.trusted,
    )
    if options.task == "find":
        print(json.dumps(asdict(find(wanted, without_gpu=options.without_gpu))))
        return 0
    if options.folder is None:
        parser.error(f"{options.task} needs the folder where the compiler goes")
    try:
        if options.task == "ready":
            ready(options.folder.absolute(), wanted)
        else:
            print(fetch(options.folder.absolute(), options.cuda or DEFAULT_CUDA))
    except FetchError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
