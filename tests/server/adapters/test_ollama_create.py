"""FROM and ADAPTER of a Modelfile, as Ollama's clients send them: files by digest, then the model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ollama
import pytest
from live_server import HTTP

from tests.server.adapters.adapted_server import ADMIN, PROMPT, Served, started, write_all


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("served"))


def client_of(served: Served) -> ollama.Client:
    return ollama.Client(served.url, headers=ADMIN)


def sent(client: ollama.Client, folder: Path) -> dict[str, str]:
    """The digest of each file, which the server has then."""
    return {path.name: client.create_blob(path) for path in sorted(folder.iterdir())}


def test_an_adapter_is_created_replaced_and_refused_whole(directory: Path, tmp_path: Path) -> None:
    with started(directory, lora_modules=(), lora_dir=str(tmp_path)) as served:
        client = client_of(served)
        base = served.ask("tiny")
        of_a = sent(client, directory / "a")
        assert client.create("style:latest", from_="tiny:latest", adapters=of_a).status == "success"
        first = served.ask("style")
        assert first != base
        steps = client.create("style", from_="tiny", adapters=sent(client, directory / "b"), stream=True)
        assert [step.status for step in steps][-1] == "success"
        second = served.ask("style")
        assert len({base, first, second}) == 3
        answer = client.generate("style", PROMPT, raw=True, options={"temperature": 0, "num_predict": 12})
        assert answer.response[:8] == second[:8]
        broken = of_a | {"adapter_config.json": client.create_blob(directory / "tiny" / "config.json")}
        kept = sorted((tmp_path / "created").iterdir())
        with pytest.raises(ollama.ResponseError) as refusal:
            client.create("other", from_="tiny", adapters=broken)
        assert refusal.value.status_code == 400
        assert sorted((tmp_path / "created").iterdir()) == kept
        assert served.names() == ["tiny", "style"]


REFUSED: list[tuple[dict[str, object], int, str]] = [
    ({"from": "gone"}, 404, "gone"),
    ({"model": "tiny"}, 400, "own name"),
    ({"model": "../up"}, 400, "model"),
    ({"adapters": {}}, 400, "adapter's files"),
    ({"adapters": {"../a": "sha256:" + "0" * 64}}, 400, "adapters"),
    ({"adapters": {"a.safetensors": "sha256:" + "0" * 64}}, 404, "was not sent"),
    ({"adapters": {"a.safetensors": "md5:0"}}, 400, "64 hexadecimal digits"),
    ({"system": "Be brief."}, 400, "system"),
    ({"files": {"model.gguf": "sha256:0"}}, 400, "files"),
]


def test_what_cannot_be_created_is_named(directory: Path, tmp_path: Path) -> None:
    with started(directory, lora_dir=str(tmp_path)) as served:
        for changes, status, expected in REFUSED:
            body = {"model": "style", "from": "tiny", "adapters": {"x.safetensors": "sha256:" + "1" * 64}}
            reply = served.post("/api/create", body | changes)
            assert (reply.status_code, expected in reply.json()["error"]) == (status, True), reply.text


def test_a_blob_needs_the_admin_key_and_has_its_digest(directory: Path, tmp_path: Path) -> None:
    with started(directory, lora_dir=str(tmp_path)) as served:
        content = b"an adapter"
        right, wrong = (
            f"{served.url}/api/blobs/sha256:{hashlib.sha256(each).hexdigest()}" for each in (content, b"")
        )
        assert HTTP.post(right, content=content).status_code == 401
        assert HTTP.post(wrong, content=content, headers=ADMIN).status_code == 400
        assert HTTP.head(wrong, headers=ADMIN).status_code == 404
        assert HTTP.post(right, content=content, headers=ADMIN).status_code == 201
        assert HTTP.head(right, headers=ADMIN).status_code == 200
        assert len(list(tmp_path.rglob("*"))) == 2
