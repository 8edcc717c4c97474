"""Setup: error messages of failed steps, the notice before PyTorch is downloaded, what is compiled where."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pybind11
import pytest
from twofold._testing import kernels

from tests.repository.sourced_build_steps import sourced

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


follow_step = script("follow_step")
torch_sizes = script("torch_sizes")


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# pip's own words for the same machine without a network, and with a proxy that refuses.
RETRYING = "WARNING: Retrying (Retry(total=4)) after connection broken by "
POOL = "HTTPSConnection(host='index.test', port=443): "
UNREACHABLE = {
    "no-dns": f"{RETRYING}'NameResolutionError(\"{POOL}Failed to resolve 'index.test' ([Errno -3] Temporary failure "
    "in name resolution)\")': /simple/cmake/",
    "no-route": f"{RETRYING}'NewConnectionError(\"{POOL}Failed to establish a new connection: [Errno 101] Network "
    "is unreachable\")': /simple/cmake/",
    "proxy": f"{RETRYING}'ProxyError('Cannot connect to proxy.', ConnectionRefusedError(111, 'Connection refused'))'",
}


@pytest.mark.parametrize("printed", UNREACHABLE.values(), ids=UNREACHABLE.keys())
def test_without_a_network_the_failure_names_it(tmp_path: Path, printed: str) -> None:
    message = tmp_path / "said.txt"
    message.write_text(
        printed
        + "\n"
        + "ERROR: Cannot install cmake\n" * 30
        + "ERROR: ResolutionImpossible: conflicting dependencies\n"
    )
    done = sourced(
        f"LOG_DIR={tmp_path}; pip_fails() {{ cat {message}; return 1; }}; run_step 'Install' pip_fails"
    )
    assert done.returncode == 1
    assert "cause:   no network: pip could not reach its package index" in done.stderr
    assert ("index.test" in done.stderr) == ("host=" in printed)
    assert "ResolutionImpossible" in done.stderr


def test_a_certificate_that_is_not_trusted_is_not_called_a_network_failure(tmp_path: Path) -> None:
    message = tmp_path / "said.txt"
    message.write_text(
        f"{RETRYING}'SSLError({POOL}[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate)'\n"
    )
    done = sourced(
        f"LOG_DIR={tmp_path}; pip_fails() {{ cat {message}; return 1; }}; run_step 'Install' pip_fails"
    )
    assert "cause:   pip does not trust the certificate of its package index at index.test" in done.stderr
    assert "export PIP_CERT=" in done.stderr
    assert "no network" not in done.stderr


def test_a_real_conflict_is_not_called_a_network_failure(tmp_path: Path) -> None:
    done = sourced(
        f"LOG_DIR={tmp_path}; conflict() {{ echo 'ERROR: ResolutionImpossible'; return 1; }}; run_step 'X' conflict"
    )
    assert done.returncode == 1
    assert "cause:" not in done.stderr


def test_pip_without_a_network_is_recognised(tmp_path: Path) -> None:
    """Runs the installed pip against a closed port, to get the messages of its current version."""
    pip = f"{sys.executable} -m pip --isolated --retries 1 --timeout 2 download --no-deps -d {tmp_path}"
    done = sourced(
        f"LOG_DIR={tmp_path}; ask() {{ {pip} --index-url https://127.0.0.1:9/simple twofold-is-not-there; }}; "
        "run_step 'Install' ask",
        PIP_CONFIG_FILE="/dev/null",
    )
    assert done.returncode == 1
    assert "cause:   no network" in done.stderr


def test_a_full_disk_hides_no_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = sourced(
        "broken() { echo 'the reason'; echo 'write: No space left on device'; return 3; }; "
        "follow 'Do it' /dev/full '--quiet' broken"
    )
    assert done.returncode == 3
    assert "| the reason" in done.stderr
    assert "cause:   the disk is full" in done.stderr
    assert "No space left on device)" in done.stderr  # the log itself could not be written


def test_what_is_missing_is_in_a_log_too(tmp_path: Path) -> None:
    done = sourced("check_prerequisites", CXX="no-such-compiler", TWOFOLD_BUILD_DIR=str(tmp_path))
    assert done.returncode == 2
    log = tmp_path / "logs/prerequisites.log"
    assert "no-such-compiler" in log.read_text()
    assert str(log) in done.stderr


def test_output_without_a_last_newline_keeps_its_line_and_its_status(tmp_path: Path) -> None:
    done = sourced(
        f"LOG_DIR={tmp_path}; odd() {{ printf 'no newline'; return 7; }}; follow 'x' {tmp_path}/log '' odd"
    )
    assert done.returncode == 7
    assert "| no newline" in done.stderr
    assert (tmp_path / "log").read_text() == "no newline\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_compiling_reports_its_progress_and_what_is_left(terminal: bool) -> None:
    out = io.StringIO()
    now = [0.0]
    progress = follow_step.Progress(out, terminal, clock=lambda: now[0])
    short, long = "Building CXX object a.cpp.o", "Building CXX object bind_a.cpp.o"
    work = [short] * 61 + [long] * 30  # the long ones come last, and are not forgotten
    for what in work:
        progress.plan(what)
    for done, what in enumerate(work, start=1):
        progress.show(done, 91, what)
        now[0] += follow_step.LONG_WEIGHT if done < 91 and work[done] is long else 1
    text = out.getvalue()
    assert "compiled 91 of 91" in text
    if terminal:
        assert text.count("\n") == 0
        assert "compiled 51 of 91, about 190 s left" in text
    else:
        assert 10 < text.count("\n") <= 25  # every ten seconds of 240
        assert "compiled 51 of 91, about 190 s left\n" in text


def test_a_compilers_error_is_shown_and_ninjas_chatter_is_not(tmp_path: Path) -> None:
    lines = (
        "-- Configuring done",
        "[1/2] Building CXX object a.o",
        "FAILED: b.o",
        "b.cpp:1: error: no",
        "ninja: no work to do.",
    )
    done = sourced(
        f"LOG_DIR={tmp_path}; said() {{ printf '%s\\n' {' '.join(repr(line) for line in lines)}; return 1; }}; "
        f"follow 'Compile' {tmp_path}/log '--compile --quiet' said"
    )
    assert done.stdout == "    compiled 1 of 2\n"
    assert "| b.cpp:1: error: no" in done.stderr
    assert "Configuring" not in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == list(lines)


CPU_ONLY = [("torch", 200), ("sympy", 6)]
WITH_CUDA = [
    ("torch", 900),
    ("sympy", 6),
    ("nvidia-cublas", 1500),
    ("nvidia-cudnn-cu13", 400),
    ("triton", 100),
]


def report_of(folder: Path, packages: list[tuple[str, int]]) -> list[object]:
    """Downloads as torch_sizes plans them, by a pip that answers with a report of files of these sizes (in MB)."""
    entries = []
    for name, megabytes in packages:
        file = folder / f"{name}.whl"
        with file.open("wb") as wheel:
            wheel.truncate(megabytes * 1_000_000)  # holes, no bytes
        entries.append({"metadata": {"name": name, "version": "1"}, "download_info": {"url": file.as_uri()}})
    pip = folder / "pip"
    executable(pip / "__init__.py", "")
    executable(
        pip / "__main__.py",
        "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--report') + 1])"
        f".write_text({json.dumps({'install': entries})!r})\n",
    )
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(folder)
    try:
        return list(torch_sizes.planned(["torch"]))
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


@pytest.mark.parametrize(
    ("packages", "no_cuda", "says", "advises"),
    [
        pytest.param(CPU_ONLY, True, "2 packages, 206 MB", False, id="cpu-build"),
        pytest.param(WITH_CUDA, True, "CUDA libraries: 3 packages, 2.0 GB", True, id="cuda-build-not-wanted"),
        pytest.param(WITH_CUDA, False, "5 packages, 2.9 GB", False, id="cuda-build-wanted"),
        pytest.param([], True, "PyTorch is there", False, id="installed"),
    ],
)
def test_sizes_come_before_the_download(
    tmp_path: Path, packages: list[tuple[str, int]], no_cuda: bool, says: str, advises: bool
) -> None:
    text = "\n".join(torch_sizes.advice(report_of(tmp_path, packages), no_cuda))
    assert says in text
    assert ("TWOFOLD_TORCH_INDEX=" in text) == advises


def test_a_size_that_the_index_lacks_is_not_invented(tmp_path: Path) -> None:
    unknown = torch_sizes.Download("torch", "1", None)
    assert "at least 0 MB" in "\n".join(torch_sizes.advice([unknown], True))
    assert torch_sizes.size_of((tmp_path / "missing.whl").as_uri()) is None
    assert torch_sizes.size_of("https://127.0.0.1:9/torch.whl") is None


@pytest.mark.parametrize(
    ("cuda", "gpu", "index", "needs_cpu"),
    [
        ("OFF", True, "https://cpu.test/whl", True),
        ("AUTO", False, "https://cpu.test/whl", True),
        ("AUTO", True, "https://cpu.test/whl", False),
        ("ON", False, "https://cpu.test/whl", False),
        ("OFF", False, "", False),
    ],
)
def test_pytorchs_cpu_index_is_used_where_cuda_is_off(
    tmp_path: Path, cuda: str, gpu: bool, index: str, needs_cpu: bool
) -> None:
    requested = tmp_path / "asked"
    executable(tmp_path / "venv/bin/python", f'#!/bin/sh\necho "$*" >>{requested}\n')
    executable(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    done = sourced(
        "install_torch",
        TWOFOLD_VENV=str(tmp_path / "venv"),
        TWOFOLD_CUDA=cuda,
        TWOFOLD_TORCH_INDEX=index,
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    sizes, install = requested.read_text().splitlines()
    assert "torch_sizes.py" in sizes
    assert ("--no-cuda" in sizes) == (cuda == "OFF" or (cuda == "AUTO" and not gpu))
    for command in (sizes, install):
        assert (f"--extra-index-url {index}" in command) == needs_cpu
        assert command.split()[-1].startswith("torch>=")


@pytest.mark.parametrize("cpu_index_reached", [True, False])
def test_a_cpu_machine_gets_the_cpu_build_where_it_can_be_had(
    tmp_path: Path, cpu_index_reached: bool
) -> None:
    """pip's index has CUDA's build alone: uv is asked for the other, and pip only where that fails."""
    requested = tmp_path / "asked"
    executable(
        tmp_path / "venv/bin/python",
        f'#!/bin/sh\necho "$*" >>{requested}\ncase "$*" in *torch_sizes.py*) exit 3;; esac\n',
    )
    code = 0 if cpu_index_reached else 1
    executable(tmp_path / "venv/bin/uv", f'#!/bin/sh\necho "uv $*" >>{requested}\nexit {code}\n')
    done = sourced("install_torch", TWOFOLD_VENV=str(tmp_path / "venv"), TWOFOLD_CUDA="OFF")
    assert done.returncode == 0, done.stderr
    _, get_uv, by_uv, *by_pip = requested.read_text().splitlines()
    assert get_uv.endswith(" uv")
    assert by_uv.startswith("uv pip install --python")
    assert "--torch-backend cpu" in by_uv
    assert [command.split()[-1].partition(">")[0] for command in by_pip] == (
        [] if cpu_index_reached else ["torch"]
    )
    assert ("could not be had" in done.stdout) == (not cpu_index_reached)


def fake_toolchain(folder: Path) -> dict[str, str]:
    """A venv whose cmake writes down how it is called."""
    executable(folder / "venv/bin/python", "#!/bin/sh\necho Python 3.11\n")
    executable(folder / "venv/bin/cmake", f'#!/bin/sh\necho "$*" >>{folder}/asked\n')
    return {"TWOFOLD_VENV": str(folder / "venv"), "TWOFOLD_BUILD_DIR": str(folder / "build")}


@pytest.mark.parametrize(
    ("profile", "dev_is_installed", "tests", "target"),
    [
        ("run", False, "OFF", "twofold_modules"),
        ("run", True, "ON", "twofold_modules"),  # one configuration: nothing is compiled twice
        ("dev", True, "ON", "all"),
    ],
)
def test_running_compiles_no_test_modules(
    tmp_path: Path, profile: str, dev_is_installed: bool, tests: str, target: str
) -> None:
    environment = fake_toolchain(tmp_path)
    if dev_is_installed:
        (tmp_path / "venv/.installed-dev").touch()
    done = sourced(f"build_native {profile}", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    configure, plan, build = (tmp_path / "asked").read_text().splitlines()
    assert plan.endswith("-- -n")
    assert f"-B {tmp_path}/build/dev" in configure
    assert f"-DTWOFOLD_TESTS={tests}" in configure.split()
    assert f"--target {target}" in build


def test_what_running_needs_is_the_core_module_alone(tmp_path: Path) -> None:
    """The plan of `make run` in a configuration that has the tests' modules and programs too; nothing is compiled."""
    cmake = Path(sys.executable).parent / "cmake"
    if not cmake.exists() or not (cmake.parent / "ninja").exists():
        pytest.skip("cmake and ninja are not there")
    path = f"{cmake.parent}:{os.environ['PATH']}"
    # The build and pybind11 lie in a folder whose name has a space, as in a checkout like that.
    tmp_path /= "two words"
    packages = tmp_path / "packages"
    packages.mkdir(parents=True)
    (packages / "pybind11").symlink_to(Path(pybind11.__file__).parent)
    options = [
        f"-DTWOFOLD_{name}" for name in ("TESTS=ON", "INPLACE=ON", "CUDA=OFF", "LEVELS=avx512_vnni,generic")
    ]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    plans = {}
    for command in (
        ["-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", *options],
        *(
            ["--build", str(tmp_path), "--target", target, "--", "-n"]
            for target in ("twofold_modules", "all")
        ),
    ):
        done = subprocess.run(
            [str(cmake), *command],
            env=dict(os.environ, PATH=path, PYTHONPATH=str(packages)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        plans[command[-3]] = done.stdout
    assert f"{packages}/pybind11/include" in (tmp_path / "CMakeCache.txt").read_text()
    modules, everything = plans["twofold_modules"], plans["all"]
    assert re.findall(r"Linking CXX (?:shared module|executable) (\S+?)\.", modules) == ["modules/_core"]
    assert "tests/" not in modules
    assert "tests/native" in everything
    # Levels that were named, and those that they are composed of.
    compiled = set(re.findall(r"twofold_kernels\.dir/cpu/([\w/]+)\.cpp", modules))
    levels = {name for name in compiled if "/" in name and not name.startswith("generic/")}
    assert levels == {"avx2/table", "avx2/integer", "avx512/table", "avx512/vnni_integer"}


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("all", "generic, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx"),
        ("avx512_bf16", "generic, avx2, avx512, avx512_bf16"),
        ("generic", "generic"),
        ("native", None),
        ("avx3", "TWOFOLD_LEVELS was given 'avx3'; it takes native, all, or some of generic, avx2"),
    ],
)
def test_levels_of_a_build(tmp_path: Path, given: str, reported: str | None) -> None:
    cmake = Path(sys.executable).parent / "cmake"
    if not cmake.exists():
        pytest.skip("cmake is not there")
    script = tmp_path / "levels.cmake"
    script.write_text(
        f'set(CMAKE_SYSTEM_PROCESSOR x86_64)\ninclude("{ROOT / "cmake/Levels.cmake"}")\n'
        'message("levels: generic;${TWOFOLD_COMPILED_LEVELS}")\n'
    )
    command = [str(cmake), f"-DTWOFOLD_LEVELS={given}", "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = " ".join(done.stderr.split())
    if given == "avx3":
        assert reported in printed
        return
    levels = [name for name in printed.partition("levels: ")[2].split(";") if name]
    assert levels == (reported.split(", ") if reported else kernels.supported_levels())


@pytest.mark.parametrize("changed", ["nothing", "compiler", "another project's"])
def test_a_build_of_another_system_is_redone_and_another_projects_is_kept(
    tmp_path: Path, changed: str
) -> None:
    environment = fake_toolchain(tmp_path)
    assert sourced("build_native run", **environment).returncode == 0
    built = tmp_path / "build/dev"
    project = "other" if changed == "another project's" else "twofold"
    (built / "CMakeCache.txt").write_text(f"CMAKE_PROJECT_NAME:STATIC={project}\n")
    (built / "old.o").touch()
    if changed != "nothing":
        executable(tmp_path / "venv/bin/python", "#!/bin/sh\necho Python 3.12\n")
    done = sourced("build_native run", **environment)
    assert (done.returncode == 0) == (project == "twofold"), done.stdout + done.stderr
    assert (built / "old.o").exists() == (changed != "compiler")
    assert ("TWOFOLD_BUILD_DIR" in done.stdout) == (changed != "nothing")


def test_the_package_takes_the_modules_of_this_environments_build(tmp_path: Path) -> None:
    modules = tmp_path / "build/dev/modules"
    modules.mkdir(parents=True)
    (modules / "_core.py").write_text("made_here = True\n")
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import twofold._core as core; print(core.made_here)"],
        env=dict(os.environ, TWOFOLD_BUILD_DIR=str(tmp_path / "build"), PYTHONPATH=str(ROOT / "engine")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
