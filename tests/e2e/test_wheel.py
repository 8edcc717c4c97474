"""The wheel, built and installed into an empty environment: its commands work in a folder without a checkout.

TWOFOLD_WHEEL names a wheel that is there. TWOFOLD_WHEEL_PYTHON names an interpreter of an environment that has it, for
instance with the oldest dependencies that pyproject.toml allows.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from twofold._testing import kernels
from twofold.tools.loadgen.server_process import serving

from tests.e2e.ports import free_port
from tests.e2e.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_cuda import find_nvcc  # noqa: E402

MOST_CUDA_BYTES = 22_000_000
"""Limit for the CUDA module with all architectures: 17 MB, half of it GPU code, which has many times the size if it is
not compressed."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TWOFOLD_WHEEL, else one that is built: minutes without a compiler cache."""
    if given := os.environ.get("TWOFOLD_WHEEL"):
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", f"--config-settings=build-dir={folder}/build"]
    # One architecture: the choice of all of them is checked without compiling (tests/repository/test_cuda_build.py).
    cuda = {"TWOFOLD_CUDA": "ON", "TORCH_CUDA_ARCH_LIST": "9.0"} if find_nvcc() else {"TWOFOLD_CUDA": "OFF"}
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(ROOT), *options, "-w", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, **cuda, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        check=False,
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """TWOFOLD_WHEEL_PYTHON, else that of an environment with the wheel, and this one's packages except its editable
    Twofold."""
    if given := os.environ.get("TWOFOLD_WHEEL_PYTHON"):
        return given
    wheel, folder = request.getfixturevalue("wheel"), tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A plain .pth adds a directory without running the .pth files in it, so the editable installation stays out.
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


DRAW_PAGES = """
from streamlit.testing.v1 import AppTest
from twofold.tools.cli.apps.folders import app_folder
folder = app_folder("dashboard") / "pages"
drawn = []
for page in sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "main")):
    app = AppTest.from_file(str(folder / "main.py"), default_timeout=120)
    if page != "overview":
        app.switch_page(f"{page}.py")
    app.run()
    assert not app.exception, (page, [item.message for item in app.exception])
    drawn.append(page)
print(*drawn)
"""
"""Draws every page of the dashboard without a browser."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TWOFOLD_", "PYTHON"))}
    return plain | {"TWOFOLD_TELEMETRY_URL": f"sqlite:///{tmp_path / 'seen.db'}", "HOME": str(tmp_path)}


@contextlib.contextmanager
def running(
    command: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def get(port: int, path: str) -> str | None:
    """The body of a 200; None while nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read().decode() if answer.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.slow
def test_the_installed_package_is_the_wheels(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    script = "import twofold; print(twofold.__file__)"
    done = subprocess.run(
        [python, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(Path(python).parents[1]), done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_holds_cuda_code_that_imports_without_a_driver(
    wheel: Path, python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    if "TWOFOLD_WHEEL" not in os.environ and find_nvcc() is None:
        pytest.skip("nvcc is not there")
    with zipfile.ZipFile(wheel) as archive:
        (module,) = [each for each in archive.infolist() if Path(each.filename).match("twofold/_cuda.*.so")]
    assert module.file_size < MOST_CUDA_BYTES
    if "TWOFOLD_WHEEL" not in os.environ:
        commands = (wheel.parent / "build/compile_commands.json").read_text()
        assert "step_control.cu" in commands
        assert "-lineinfo" not in commands
    script = "from twofold import _cuda; print(bool(_cuda.devices()), _cuda.why_no_device())"
    no_driver = tmp_path / "libcuda.so.1"
    no_driver.write_bytes(b"")  # found before a real one, and not loadable
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run(
        [python, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False there is no libcuda.so.1; install the NVIDIA driver\n"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["avx2", "generic"])
def test_serve_and_loadtest_run_from_the_wheel(
    python: str, environment: dict[str, str], tmp_path: Path, level: str
) -> None:
    if level not in kernels.supported_levels():
        pytest.skip(f"this CPU does not run the level {level}")
    twofold = [python, "-m", "twofold.tools.cli"]
    serve = [*twofold, "serve", "--port", "0", "--accelerator", "none"]
    environment["TWOFOLD_ISA"] = level
    with serving(serve, tmp_path / "log", timeout_s=300, environment=environment, folder=tmp_path) as server:
        done = subprocess.run(
            [*twofold, "loadtest", "--host", server.url, "--users", "2", "--seconds", "3"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with sqlite3.connect(tmp_path / "seen.db") as connection:
            assert connection.execute("SELECT cpu_isa FROM run").fetchall() == [(level,)]
        assert "on its dashboard, as loadtest-" in done.stdout
    done = subprocess.run(
        [python, "-c", DRAW_PAGES], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"overview", "requests", "loadtests", "machine"} <= set(done.stdout.split())


@pytest.mark.slow
def test_the_dashboard_and_locusts_page_run_from_the_wheel(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    twofold, port = [python, "-m", "twofold.tools.cli"], free_port()
    with running([*twofold, "dashboard", "--port", str(port)], tmp_path, environment) as process:
        wait_until(
            lambda: get(port, "/_stcore/health") is not None or process.poll() is not None, limit_s=120
        )
        assert process.poll() is None, (tmp_path / "log").read_text()
        page = get(port, "/")
        assert page is not None
        assert "<title>" in page
        # Nothing but this process answers, and it was configured to contact no other.
        assert "gatherUsageStats" not in (tmp_path / "log").read_text()
    port = free_port()
    with running([*twofold, "loadtest", "--ui", "--ui-port", str(port)], tmp_path, environment) as process:
        wait_until(lambda: get(port, "/") is not None or process.poll() is not None, limit_s=120)
        assert process.poll() is None, (tmp_path / "log").read_text()
        page = get(port, "/")
        assert page is not None
        assert "Locust" in page
