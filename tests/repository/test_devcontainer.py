"""The devcontainer files: their JSON against the published properties of devcontainer.json, and against the project.

The schema below restates, for the properties this project uses, what the development container specification allows; a
property it does not know is an error here, as a misspelt one would be ignored silently by the tools.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".devcontainer"
VARIANTS = [FOLDER / "devcontainer.json", FOLDER / "cuda" / "devcontainer.json"]

SIZE = {"type": "string", "pattern": r"^\d+([tgmk]b)?$"}
STRINGS = {"type": "array", "items": {"type": "string"}}
COMMAND = {
    "anyOf": [
        {"type": "string"},
        STRINGS,
        {"type": "object", "additionalProperties": {"type": ["string", "array"]}},
    ]
}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "build"],
    "properties": {
        "name": {"type": "string"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["dockerfile"],
            "properties": {
                "dockerfile": {"type": "string"},
                "context": {"type": "string"},
                "target": {"type": "string"},
                "args": TEXTS,
                "options": STRINGS,
            },
        },
        "remoteUser": {"type": "string"},
        "containerUser": {"type": "string"},
        "updateRemoteUserUID": {"type": "boolean"},
        "hostRequirements": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "cpus": {"type": "integer", "minimum": 1},
                "memory": SIZE,
                "storage": SIZE,
                "gpu": {"anyOf": [{"type": "boolean"}, {"const": "optional"}, {"type": "object"}]},
            },
        },
        "containerEnv": TEXTS,
        "remoteEnv": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "mounts": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["type", "target"],
                        "properties": {
                            "type": {"enum": ["bind", "volume"]},
                            "source": {"type": "string"},
                            "target": {"type": "string"},
                        },
                    },
                ]
            },
        },
        "initializeCommand": COMMAND,
        "postCreateCommand": COMMAND,
        "forwardPorts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 65535}},
        "portsAttributes": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "label": {"type": "string"},
                    "onAutoForward": {
                        "enum": [
                            "notify",
                            "openBrowser",
                            "openBrowserOnce",
                            "openPreview",
                            "silent",
                            "ignore",
                        ]
                    },
                    "requireLocalPort": {"type": "boolean"},
                    "protocol": {"enum": ["http", "https"]},
                },
            },
        },
        "customizations": {"type": "object"},
    },
}


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def is_valid(data: object) -> bool:
    return bool(jsonschema.Draft201909Validator(SCHEMA).is_valid(data))


@pytest.mark.parametrize("path", VARIANTS, ids=["cpu", "cuda"])
def test_json_is_what_the_specification_allows(path: Path) -> None:
    jsonschema.Draft201909Validator(SCHEMA).validate(load(path))


@pytest.mark.parametrize(
    "change",
    [
        {"forwardPort": [1]},
        {"hostRequirements": {"gpu": "maybe"}},
        {"mounts": [{"type": "tmpfs", "target": "/x"}]},
    ],
)
def test_the_schema_refuses_what_is_wrong(change: dict[str, Any]) -> None:
    assert not is_valid(load(VARIANTS[0]) | change)


@pytest.mark.parametrize("path", VARIANTS, ids=["cpu", "cuda"])
def test_files_it_names_exist_and_the_ports_are_the_defaults(path: Path) -> None:
    data = load(path)
    assert (path.parent / data["build"]["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert (path.parent / data["build"]["context"] / "install.sh").is_file()
    assert (ROOT / data["postCreateCommand"].split()[0]).is_file()
    assert data["forwardPorts"] == [10002, 8501]
    assert set(data["portsAttributes"]) == {"10002", "8501"}
    assert [mount["target"] for mount in data["mounts"]] == ["/models"]


def test_nobody_works_as_root_and_the_user_is_the_one_that_the_image_makes() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    account = re.search(r"^ARG ACCOUNT=(\w+)$", dockerfile, re.MULTILINE)
    assert account is not None
    assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE) == ["${ACCOUNT}"]
    assert {load(path)["remoteUser"] for path in VARIANTS} == {account[1]}


def test_only_the_cuda_variant_asks_for_a_gpu_and_does_not_insist() -> None:
    cpu, cuda = (load(path) for path in VARIANTS)
    assert "gpu" not in cpu["hostRequirements"]
    assert cuda["hostRequirements"]["gpu"] == "optional"
    assert "cuda" in cuda["build"]["args"]["BASE_IMAGE"]


def test_the_variants_differ_in_nothing_else() -> None:
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


def test_the_container_keeps_what_it_builds_out_of_the_workspace() -> None:
    for path in VARIANTS:
        environment = load(path)["containerEnv"]
        assert environment["TWOFOLD_VENV"].startswith("/home/twofold/")
        assert environment["TWOFOLD_BUILD_DIR"].startswith("/home/twofold/")
