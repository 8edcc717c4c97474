"""The CUDA half of the build: what it is made for, that it compiles without spills, that it imports without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_cuda  # noqa: E402

from scripts.cuda_table.sass import parse_report  # noqa: E402

SPILLING = """
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90'
ptxas info    : Function properties for _Z1aPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 96 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_80'
ptxas info    : Function properties for _Z1bPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
"""


def needs_nvcc() -> str:
    nvcc = check_cuda.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not there")
    return nvcc


def test_a_spill_in_the_compilers_report_is_seen() -> None:
    a, b = parse_report(SPILLING)
    assert (a.name, a.arch, a.registers, a.stack_bytes, a.spill_bytes) == ("_Z1aPf", 90, 40, 16, 20)
    assert a.shared_bytes == 96
    assert (b.arch, b.spill_bytes, b.shared_bytes) == (80, 0, 0)


@pytest.mark.slow
def test_a_kernel_compiles_for_every_architecture_without_spills(tmp_path: Path) -> None:
    needs_nvcc()
    table = tmp_path / "table.json"
    assert check_cuda.main([str(ROOT / "kernels/cuda/step_control.cu"), "--json", str(table)]) == 0
    compiled = {kernel["arch"] for kernel in json.loads(table.read_text())}
    assert compiled == set(check_cuda.ARCHITECTURES)


def test_a_spill_fails_the_check(tmp_path: Path) -> None:
    needs_nvcc()
    source = tmp_path / "spills.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) spills(float* x) {\n  float v[64];\n"
        "#pragma unroll\n  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[63 - i] * v[i];\n}\n"
    )
    assert check_cuda.main([str(source), "--arch", "90"]) == 1


def test_the_module_is_built_where_nvcc_is_and_reports_devices_without_one() -> None:
    needs_nvcc()
    if os.environ.get("TWOFOLD_CUDA") == "OFF":
        pytest.skip("built with TWOFOLD_CUDA=OFF")
    if importlib.util.find_spec("twofold._cuda") is None and os.environ.get("TWOFOLD_TESTS_NEED_ALL") != "1":
        pytest.skip("this checkout was built without CUDA")
    from twofold import _cuda

    assert _cuda.devices() or _cuda.why_no_device()


@pytest.mark.parametrize(
    ("cuda", "says"), [(12040, "it has CUDA 12.4, this build needs"), (0, "there is no libcuda.so.1")]
)
def test_a_driver_too_old_for_the_build_is_named_with_the_version_to_install(
    tmp_path: Path, cuda: int, says: str
) -> None:
    """The runtime itself reports an old driver and a missing one alike."""
    if importlib.util.find_spec("twofold._cuda") is None:
        pytest.skip("this checkout was built without CUDA")
    source = tmp_path / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {cuda}; return 0; }}\n")
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", "from twofold import _cuda; print(_cuda.devices(), _cuda.why_no_device())"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert done.stdout.startswith("[] ")
    assert says in done.stdout


def configure(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run only the part of the configuration that decides on CUDA."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(x LANGUAGES CXX)\n"
        f'option(TWOFOLD_INPLACE "" OFF)\nset(Python_EXECUTABLE "{sys.executable}")\n'
        f'include("{ROOT}/cmake/Cuda.cmake")\n'
        'message(STATUS "for running: ${TWOFOLD_RUNS_CUDA}")\n'
    )
    cmake = next(
        (path for path in (Path(sys.executable).parent / "cmake", Path("/usr/bin/cmake")) if path.exists()),
        None,
    )
    if cmake is None:
        pytest.skip("cmake is not there")
    env = {name: value for name, value in os.environ.items() if name != "TORCH_CUDA_ARCH_LIST"} | environment
    command = [str(cmake), "-S", str(tmp_path), "-B", str(tmp_path / "build"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_a_wheel_is_compiled_for_all_architectures(tmp_path: Path) -> None:
    needs_nvcc()
    done = configure(tmp_path, "-DTWOFOLD_CUDA=ON")
    assert done.returncode == 0, done.stderr
    assert "for 80-real;86-real;89-real;90;120" in done.stdout
    assert "for running: ON" in done.stdout


@pytest.mark.slow
def test_torchs_list_of_architectures_is_respected(tmp_path: Path) -> None:
    needs_nvcc()
    done = configure(tmp_path, "-DTWOFOLD_CUDA=ON", TORCH_CUDA_ARCH_LIST="8.6;9.0+PTX")
    assert done.returncode == 0, done.stderr
    assert "for 86-real;90" in done.stdout


def test_a_wrong_list_of_architectures_is_named(tmp_path: Path) -> None:
    needs_nvcc()
    done = configure(tmp_path, "-DTWOFOLD_CUDA=ON", TORCH_CUDA_ARCH_LIST="Hopper")
    assert done.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST holds 'Hopper'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "tests", "says", "runs"),
    [
        ("", "OFF", "nvidia-smi lists no GPU; building for the CPU", "OFF"),
        ("", "ON", "for 90", "OFF"),  # no edit may break the CUDA half unseen; running needs none of it
        ("8.6", "OFF", "for 86-real", "ON"),
    ],
)
def test_cuda_is_compiled_by_itself_where_a_gpu_is_found_and_for_tests(
    tmp_path: Path, gpu: str, tests: str, says: str, runs: str
) -> None:
    """`runs`: whether what `make run` compiles holds it."""
    needs_nvcc()
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\n[ -n '{gpu}' ] && echo '{gpu}'\n")
    smi.chmod(0o755)
    options = "-DTWOFOLD_CUDA=AUTO", "-DTWOFOLD_INPLACE=ON", f"-DTWOFOLD_TESTS={tests}"
    done = configure(tmp_path, *options, PATH=f"{smi.parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert f"for running: {runs}" in done.stdout


@pytest.mark.parametrize(
    "printed", ["unsupported GNU version! gcc versions later than 15", "collect2: error: ld"]
)
def test_a_compiler_that_cannot_build_is_a_reason_and_no_failure(tmp_path: Path, printed: str) -> None:
    nvcc = tmp_path / "toolkit/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\necho "release 13.0, V13.0.88"\n[ "$1" = --version ] || {{ echo "{printed}"; exit 1; }}\n'
    )
    nvcc.chmod(0o755)
    options = "-DTWOFOLD_CUDA=AUTO", "-DTWOFOLD_TESTS=ON", "-DTWOFOLD_INPLACE=ON"
    done = configure(tmp_path, *options, CUDA_HOME=str(tmp_path / "toolkit"))
    assert done.returncode == 0, done.stderr
    assert f"cannot build with /usr/bin/c++: {printed}; building for the CPU" in " ".join(done.stdout.split())
    kept = json.loads((tmp_path / "build/modules/cuda_missing.json").read_text())
    assert printed in kept["problem"]
    assert kept["remedy"]
    configure(tmp_path, "-DTWOFOLD_CUDA=OFF", *options[1:])
    kept = json.loads((tmp_path / "build/modules/cuda_missing.json").read_text())
    assert kept["problem"] == "it was made with TWOFOLD_CUDA=OFF"


@pytest.mark.parametrize(
    ("wanted", "says"), [("OFF", "building for the CPU"), ("maybe", "it takes AUTO, ON or OFF")]
)
def test_cuda_can_be_left_out(tmp_path: Path, wanted: str, says: str) -> None:
    done = configure(tmp_path, f"-DTWOFOLD_CUDA={wanted}")
    assert (done.returncode == 0) == (wanted == "OFF")
    assert says in " ".join((done.stdout + done.stderr).split())
