"""The examples of the API guides work: curl's requests and Python clients, against a real engine with a tiny model."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.cli.documented import GUIDES, PAGES, ROOT, documented
from tests.tiny_models.adapters import write_tiny_adapter
from tests.tiny_models.writing import TinyModel, write_tiny_model

APIS = (
    "openai-api",
    "responses-api",
    "anthropic-api",
    "ollama-api",
    "operations",
    "tools-and-structured-output",
)
API_PAGES = [ROOT / "README.md", *(GUIDES / f"{name}.md" for name in APIS)]
DOCUMENTED = re.compile(r"http://127\.0\.0\.1:10002")


def requests_of(path: Path) -> list[list[str]]:
    return [list(each.words[1:]) for each in documented(path) if each.program == "curl"]


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("-s", "-N"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="body")
    parser.add_argument("url")
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("m")
    model = write_tiny_model(folder / "tiny", TinyModel(max_position_embeddings=1024))
    for seed, name in enumerate(("style", "terse")):
        write_tiny_adapter(folder / "adapters" / name, seed)
    engine = Engine.load(
        EngineConfig(
            model=str(model),
            accelerator="none",
            cpu_threads=1,
            max_total_tokens=4096,
            lora_modules=(f"style={folder / 'adapters' / 'style'}",),
            lora_dir=str(folder / "adapters"),
        )
    )
    engine.start()
    config = ServerConfig(admin_key="KEY", served_model_name=("twofold-tales",))
    with serving(create_app(engine, config)) as base:
        yield base
    engine.close()


EXAMPLES = [(path.stem, words) for path in PAGES for words in requests_of(path)]


@pytest.mark.parametrize(("page", "words"), EXAMPLES, ids=[f"{p}-{w[-1][:20]}" for p, w in EXAMPLES])
def test_a_documented_request_is_answered(url: str, page: str, words: list[str]) -> None:
    given = parsed(words)
    assert DOCUMENTED.match(given.url), "examples use the default address"
    headers = {"content-type": "application/x-www-form-urlencoded"} if given.body else {}
    headers |= {
        name.lower(): value.strip() for name, _, value in (each.partition(":") for each in given.headers)
    }
    method = given.method or ("GET" if given.body is None else "POST")
    answer: httpx.Response = HTTP.request(
        method, DOCUMENTED.sub(url, given.url), headers=headers, content=given.body
    )
    assert answer.status_code == 200, answer.text
    assert answer.content


@pytest.mark.parametrize("path", API_PAGES, ids=lambda path: path.stem)
def test_an_api_page_begins_with_a_request(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.parent == GUIDES:
        assert "curl" in re.split(r"\n\n", text)[1]
    assert requests_of(path)


@pytest.mark.parametrize("path", [ROOT / "README.md", GUIDES / "openai-api.md"], ids=lambda path: path.stem)
def test_the_documented_client_prints_an_answer(url: str, path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    code = DOCUMENTED.sub(url, program).replace("messages=", "max_tokens=8, messages=")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
