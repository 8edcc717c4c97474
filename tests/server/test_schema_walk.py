"""Schemathesis asks a real server what /openapi.json allows, and what it does not: no 5xx, and no answer of a status, a
type or a shape that is not documented there. The official clients' types accept every answer and event.

/openapi.json has schemas of its own and not those types: it lists what this server sends, with the fields of other
servers that it adds. Theirs list what their services may send; openai's `Response` needs 231 schemas, ours 11.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, Final

import anthropic.types as anthropic
import jsonschema
import ollama
import openai.types as openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from live_server import HTTP, serving
from openai.types import chat, responses
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import APIOperation
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.tiny_models.writing import TinyModel, write_tiny_model

CONTEXT = 64
"""Tokens: an answer that says nothing of its length is short."""
PROMPTS = ("model", "messages", "prompt", "tokens")
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
CLIENT_TYPES: Final = {
    path: TypeAdapter(accepted)
    for path, accepted in {
        "/v1/chat/completions": chat.ChatCompletion | chat.ChatCompletionChunk,
        "/v1/completions": openai.Completion,
        "/v1/embeddings": openai.CreateEmbeddingResponse,
        "/v1/responses": responses.Response | responses.ResponseStreamEvent,
        "/v1/messages": anthropic.Message | anthropic.RawMessageStreamEvent,
        "/v1/messages/count_tokens": anthropic.MessageTokensCount,
        "/api/chat": ollama.ChatResponse,
        "/api/embed": ollama.EmbedResponse,
        "/api/embeddings": ollama.EmbeddingsResponse,
        "/api/generate": ollama.GenerateResponse,
        "/api/ps": ollama.ProcessResponse,
        "/api/show": ollama.ShowResponse,
        "/api/tags": ollama.ListResponse,
    }.items()
}
NOT_TYPED: Final = ("ping", "error")
"""Types of events that the clients read before they apply their types."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    path = write_tiny_model(folder, TinyModel(max_position_embeddings=CONTEXT))
    # No request asks for more answers at once than there are places: 503 is documented, and a 5xx.
    config = EngineConfig(
        model=str(path), accelerator="none", cpu_threads=1, max_num_seqs=8, max_total_tokens=4096
    )
    engine = Engine.load(config)
    engine.start()
    with serving(create_app(engine, ServerConfig(slots_show_prompts=True))) as base:
        yield base
    engine.close()


def operations(url: str) -> list[APIOperation]:
    schema = schemathesis.openapi.from_dict(HTTP.get(f"{url}/openapi.json").json())
    schema.config.update(base_url=url)
    return [result.ok() for result in schema.get_all_operations()]


def check_lines(operation: APIOperation, response: schemathesis.Response) -> None:
    """A stream of lines, which schemathesis does not read: each is what its `itemSchema` says."""
    if response.headers["content-type"] != ["application/x-ndjson"]:
        return
    document = operation.schema.raw_schema
    reported = document["paths"][operation.path][operation.method]["responses"][str(response.status_code)]
    schema = reported["content"]["application/x-ndjson"]["itemSchema"] | {
        "components": document["components"]
    }
    for line in response.content.splitlines():
        jsonschema.Draft202012Validator(schema).validate(json.loads(line))


def check_client_types(path: str, response: schemathesis.Response) -> None:
    """The answer, or every event or line of a stream, is one that the official client's types describe."""
    accepted = CLIENT_TYPES.get(path)
    if accepted is None or response.status_code != 200:
        return
    text = response.content.decode()
    whole = response.headers["content-type"][0].startswith("application/json")
    for line in [text] if whole else text.splitlines():
        part = line.removeprefix("data: ")
        if not whole and (not part.startswith("{") or json.loads(part).get("type") in NOT_TYPED):
            continue
        accepted.validate_json(part, strict=True)


def walk(operation: APIOperation, num_examples: int) -> set[int]:
    """Requests that the operation's schema allows, and as many that it does not; the statuses that came."""
    seen: set[int] = set()
    load_all_checks()
    checks = list(CHECKS.get_by_names(CHECKED))
    valid, invalid = (
        operation.as_strategy(mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    takes_anything = not (operation.body or operation.query or operation.path_parameters)

    @seed(zlib.crc32(operation.label.encode()))
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=valid if takes_anything else valid | invalid, num_fields=st.integers(0, 4))
    def ask(case: schemathesis.Case, num_fields: int) -> None:
        if isinstance(case.body, dict):
            case.body = narrowed(case.body, num_fields)
        response = case.call(timeout=60)
        seen.add(response.status_code)
        case.validate_response(response, checks=checks)
        check_lines(operation, response)
        check_client_types(operation.path, response)

    ask()
    return seen


def narrowed(body: dict[str, Any], num_fields: int) -> dict[str, Any]:
    """The served model instead of a drawn name, and few fields besides the prompt: drawn ones seldom go together."""
    kept = [name for name in body if name not in PROMPTS][:num_fields]
    body = {name: value for name, value in body.items() if name in PROMPTS or name in kept}
    return body | ({"model": "tiny"} if isinstance(body.get("model"), str) else {})


def walk_all(url: str, num_examples: int) -> dict[str, set[int]]:
    """Statuses seen per operation; all errors are reported together."""
    seen, wrong = {}, []
    for operation in operations(url):
        try:
            seen[operation.label] = walk(operation, num_examples)
        except Exception as error:
            wrong.append(f"{operation.label}: {error}")
    assert not wrong, "\n\n".join(wrong)
    return seen


def test_a_few_requests_of_every_operation(url):
    seen = walk_all(url, 2)
    assert {"POST /v1/chat/completions", "POST /api/generate", "GET /metrics"} <= seen.keys()
    assert all(seen.values())


@pytest.mark.slow
def test_many_requests_of_every_operation(url):
    seen = walk_all(url, 100)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert {200, 400} <= seen[f"POST {path}"]
