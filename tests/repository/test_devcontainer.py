"""The devcontainer files name files and ports of the project; the account they make owns what the host's user owns."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".devcontainer"
VARIANTS = [FOLDER / "devcontainer.json", FOLDER / "cuda" / "devcontainer.json"]


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("path", VARIANTS, ids=["cpu", "cuda"])
def test_files_it_names_exist_and_the_ports_are_the_defaults(path: Path) -> None:
    data = load(path)
    assert (path.parent / data["build"]["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert (path.parent / data["build"]["context"] / "install.sh").is_file()
    assert (ROOT / data["postCreateCommand"].split()[0]).is_file()
    assert data["forwardPorts"] == [10002, 8501]
    assert set(data["portsAttributes"]) == {"10002", "8501"}
    assert [mount["target"] for mount in data["mounts"]] == ["/models"]


def test_the_user_is_the_one_that_the_image_makes_and_not_root() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    account = re.search(r"^ARG ACCOUNT=(\w+)$", dockerfile, re.MULTILINE)
    assert account is not None
    assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE) == ["${ACCOUNT}"]
    assert {load(path)["remoteUser"] for path in VARIANTS} == {account[1]}


def test_the_variants_differ_only_in_what_cuda_needs() -> None:
    cpu, cuda = (load(path) for path in VARIANTS)
    for data in (cpu, cuda):
        for key in ("name", "build", "hostRequirements"):
            del data[key]
        del data["containerEnv"]["TWOFOLD_CUDA"]
    assert cpu == cuda


PASSWD = "root:x:0:0:root:/root:/bin/bash\n"
GROUP = "root:x:0:\nstaff:x:50:\n"


@pytest.mark.parametrize(
    ("user", "group"),
    [
        pytest.param("", "", id="plain"),
        pytest.param("ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash\n", "ubuntu:x:1000:\n", id="ubuntu"),
        pytest.param("someone:x:1000:50::/home/someone:/bin/sh\n", "", id="user-without-group"),
        pytest.param("", "users1000:x:1000:\n", id="group-without-user"),
    ],
)
def test_the_account_owns_what_uid_1000_of_the_host_owns(tmp_path: Path, user: str, group: str) -> None:
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("needs root and shadow's useradd")
    (tmp_path / "etc").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD + user)
    (tmp_path / "etc/group").write_text(GROUP + group)
    (tmp_path / "etc/shadow").write_text(
        "".join(f"{line.split(':')[0]}:!:19000::::::\n" for line in user.splitlines())
    )
    (tmp_path / "etc/gshadow").write_text("")
    for _ in range(2):  # the second time there is nothing to do
        subprocess.run(
            [FOLDER / "account.sh", "twofold", "--prefix", str(tmp_path)], check=True, capture_output=True
        )
        accounts = [line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()]
        assert [(a[0], a[3], a[5], a[6]) for a in accounts if a[2] == "1000"] == [
            ("twofold", "1000", "/home/twofold", "/bin/bash")
        ]
        groups = [line.split(":") for line in (tmp_path / "etc/group").read_text().splitlines()]
        assert [g[0] for g in groups if g[2] == "1000"] == ["twofold"]
        home = (tmp_path / "home/twofold").stat()
        assert (home.st_uid, home.st_gid) == (1000, 1000)
