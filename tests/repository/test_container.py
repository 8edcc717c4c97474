"""The container image's recipe: what it copies and installs exists, it is not root, its health check is true."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import tomllib
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from twofold.api.config import ServerConfig
from twofold.tools.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/container/Dockerfile").read_text("utf-8").replace("\\\n", " ")
FINAL = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]


def instruction(name: str) -> str:
    """Arguments of the final image's only instruction of this name."""
    (found,) = re.findall(rf"^{name} +(.+)$", FINAL, re.MULTILINE)
    return str(found)


def test_the_server_is_an_account_without_privileges_that_owns_its_folders() -> None:
    assert instruction("USER") == "1000"
    assert "useradd --uid 1000" in instruction("RUN")
    folders = json.loads(instruction("VOLUME"))
    assert re.search(r"install -d -o (\S+) -g \1 " + " ".join(folders), instruction("RUN"))
    assert instruction("WORKDIR") in folders
    for setting in re.findall(r"=(?:sqlite:///)?(/\S+)", instruction("ENV")):
        assert setting.startswith(("/opt/twofold/bin", *folders))


def test_the_image_serves_with_the_command_that_exists_on_the_ports_it_exposes() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["twofold"]
    args = build_parser("serve").parse_args(json.loads(instruction("CMD")))
    assert args.host == "0.0.0.0"
    assert instruction("EXPOSE").split() == [str(ServerConfig().port), "8501"]


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_distinguishes_ready_and_loading(status: int, healthy: bool) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        here = [word.replace(f":{ServerConfig().port}/", f":{server.server_port}/") for word in command]
        assert here != command
        done = subprocess.run(here, capture_output=True, check=False, timeout=60)
    assert (done.returncode == 0) == healthy


def test_what_the_wheel_is_built_from_reaches_the_build() -> None:
    """.dockerignore leaves out no file of the build, and what it leaves out is not copied by accident."""
    ignored = [
        line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"
    ]
    scikit = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["scikit-build"]
    needed = {Path(source).parts[0] for source in scikit["wheel"]["packages"].values()}
    needed |= {"CMakeLists.txt", "cmake", "kernels", "models", "README.md", "LICENSE", "constraints.txt"}
    assert {name for name in needed if any(fnmatch(name, each) for each in ignored)} == set()
    assert {".git", ".venv", "build"} <= set(ignored)


def test_it_installs_extras_that_exist_at_every_level_of_the_kernels() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    (named,) = re.findall(r"/source\[([\w,]+)\]", DOCKERFILE)
    assert set(named.split(",")) <= set(extras)
    assert "TWOFOLD_LEVELS=all" in DOCKERFILE
