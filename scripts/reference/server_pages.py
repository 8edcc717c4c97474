"""Reference pages of the server and its database: HTTP routes, request fields, metrics, telemetry tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from starlette.testclient import TestClient
from twofold.api.config import ServerConfig
from twofold.server.app import app_of
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.middleware import CHAT_SCRIPTS
from twofold.server.openai.fields import ENDPOINTS, FIELDS, State
from twofold.telemetry import migrations, schema

from scripts.reference.tables import anchor, cell, table

ROUTES: Final = {
    "DELETE /admin/requests/{request_id}": "Cancels a request.",
    "DELETE /v1/responses/{response_id}": "Forgets a stored response.",
    "GET /": "The chat page for a browser; other programs read that Ollama is running, and so detect a server.",
    "POST /api/blobs/{digest}": "Keeps a file of an adapter, as Ollama's clients send it.",
    "POST /api/create": "Serves an adapter: FROM and ADAPTER of Ollama's Modelfile.",
    "GET /chat.css": "The chat page's style.",
    **{f"GET /{name}.js": "A module of the chat page." for name in CHAT_SCRIPTS},
    "GET /chat/about": "The dashboard's address and command, for the chat page.",
    "GET /chat/placement/{request_id}": "Where each answer token's experts ran; with `--telemetry-url`.",
    "GET /admin/cache": "Slots in use by layer, hits, uploads; pages, bytes and hits of the prefix cache.",
    "GET /admin/experts": "State of the recording of routed experts.",
    "GET /admin/placement": "Most valuable experts of each layer; query `layer`, `top`.",
    "GET /admin/placement/experts": "All experts in slots.",
    "GET /admin/requests": "Running and waiting requests, by size.",
    "GET /admin/status": "Load, memory and speed.",
    "GET /api/ps": "The model, with the bytes of its expert slots.",
    "GET /api/tags": "The served models.",
    "GET /api/version": "Version of Ollama's API that is implemented.",
    "GET /dump_expert_distribution_record": "SGLang's name of `/admin/experts/dump`.",
    "GET /get_model_info": "SGLang's older name of `/model_info`.",
    "GET /get_server_info": "SGLang's older name of `/server_info`.",
    "GET /health": "Phase, accelerator, clock, queue, telemetry; 503 unless ready.",
    "GET /metrics": "Prometheus text: [metrics](metrics.md).",
    "GET /lora-adapters": "llama.cpp's: adapters, with the scales of requests that name none.",
    "GET /props": "llama.cpp's: default generation settings, slots, chat template.",
    "GET /ready": "The phase only: 200 or 503, for frequent probes.",
    "GET /slots": "llama.cpp's: the request of each slot.",
    "GET /start_expert_distribution_record": "SGLang's name of `/admin/experts/start`.",
    "GET /stop_expert_distribution_record": "SGLang's name of `/admin/experts/stop`.",
    "GET /model_info": "SGLang's: the model's names, for its router.",
    "GET /server_info": "SGLang's: the model's names, limits and version, for its router.",
    "GET /models": "llama.cpp's name of `/v1/models`.",
    "GET /v1/models": "The served models, once for each name, with their states.",
    "GET /v1/models/{name}": "One served model.",
    "GET /v1/responses/{response_id}": "A stored response.",
    "GET /v1/responses/{response_id}/input_items": "The input items of a stored response.",
    "GET /version": "The server's version.",
    "POST /chat/markdown": "Markdown as HTML by blocks, for the chat page; HTML in it stays text.",
    "POST /admin/cache/drop_prefixes": "Drops the prefixes that no running request uses.",
    "POST /admin/experts/dump": "Writes the recording to files.",
    "POST /admin/experts/start": 'Starts recording routed experts; body `{"mode": …}` or none.',
    "POST /admin/experts/stop": "Stops recording.",
    "POST /admin/placement/experts": "Loads other experts into the slots.",
    "POST /admin/resize": "Changes the split of memory between experts and KV cache.",
    "POST /admin/sleep": "Frees expert slots and KV cache.",
    "POST /admin/wake": "Allocates them again.",
    "POST /api/chat": "Ollama: answers a conversation.",
    "POST /api/embed": "Ollama: embeddings of texts.",
    "POST /api/embeddings": "Ollama: the embedding of one text, by the older route.",
    "POST /api/generate": "Ollama: continues a prompt.",
    "POST /api/pull": "Ollama: reports success for a served model; downloads nothing.",
    "POST /api/show": "Ollama: the model's details.",
    "POST /detokenize": "Token ids to text.",
    "POST /dump_expert_distribution_record": "SGLang's name of `/admin/experts/dump`.",
    "POST /infill": "llama.cpp's: fills a gap between two texts, for editors.",
    "POST /internal/load_samples": "Samples of a load test, from this machine only.",
    "POST /rerank": "As `/v1/rerank`.",
    "POST /score": "vLLM: scores of pairs of texts.",
    "POST /load_lora_adapter": "SGLang's: as `/v1/load_lora_adapter`.",
    "POST /lora-adapters": "llama.cpp's: sets the scales of adapters in requests that name none.",
    "POST /models/load": "llama.cpp's: begins to load a model of several.",
    "POST /models/unload": "llama.cpp's: unloads a model once its running requests have finished.",
    "POST /start_expert_distribution_record": "SGLang's name of `/admin/experts/start`.",
    "POST /stop_expert_distribution_record": "SGLang's name of `/admin/experts/stop`.",
    "POST /tokenize": "Text or messages to token ids.",
    "POST /v1/chat/completions": "OpenAI: answers a conversation.",
    "POST /v1/completions": "OpenAI: continues a prompt.",
    "POST /v1/embeddings": "OpenAI: embeddings of texts or token ids.",
    "POST /v1/load_lora_adapter": "vLLM's: loads an adapter from below --lora-dir.",
    "POST /v1/messages": "Anthropic: answers a conversation.",
    "POST /v1/messages/count_tokens": "Anthropic: counts a conversation's tokens.",
    "POST /v1/rerank": "Jina and vLLM: documents by their relevance to a query.",
    "POST /v1/responses": "OpenAI: answers a conversation, in the form that Codex uses.",
    "POST /v1/responses/input_tokens": "OpenAI: counts the tokens of a request's input.",
    "POST /v1/responses/{response_id}/cancel": "400: no response runs in the background.",
    "POST /v1/score": "As `/score`.",
    "POST /unload_lora_adapter": "SGLang's: as `/v1/unload_lora_adapter`.",
    "POST /v1/unload_lora_adapter": "vLLM's: unloads an adapter; its running requests finish.",
    "POST /v2/rerank": "Cohere: as `/v1/rerank`.",
}
"""One sentence per route. A route without one is an error."""


_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_NOTES: Final = {
    title: {field.name: field.note for field in FIELDS if field.endpoint == endpoint}
    for title, endpoint in (("ChatRequest", "chat"), ("CompletionRequest", "completions"))
}
"""Meanings of fields that the schema does not describe."""


def http_routes() -> str:
    """Page of every route, then the fields of every body and answer."""
    app: Any = app_of(ServerState(ServerConfig(admin_key="any"), None))._app
    document = app.openapi()
    found = {
        f"{method} {re.sub(r':path}', '}', route.path)}"
        for route in _routes(app)
        for method in getattr(route, "methods", ())
        if route.path != "/openapi.json" and method != "HEAD"
    }
    if unexplained := found ^ ROUTES.keys():
        raise SystemExit(f"ROUTES and the application differ in: {', '.join(sorted(unexplained))}")
    rows = [(f"`{name}`", ROUTES[name], *_schemas_of(document, name)) for name in sorted(found, key=_by_path)]
    parts = [
        "`GET /openapi.json` returns this as a schema. Fields of chat requests and completions are explained in "
        "[request fields](request-fields.md). Routes under `/admin` need `--admin-key`, as do those that load, unload "
        "or scale adapters.",
        table(("route", "what it does", "body", "answer"), rows),
    ]
    bodies = {
        schema["title"]: schema for schema in map(_body, _operations(document)) if "properties" in schema
    }
    for name, component in sorted((document["components"]["schemas"] | bodies).items()):
        if "properties" in component:
            parts += [f"## {name}", *_fields(component, _NOTES.get(name, {}))]
    return "\n\n".join(parts)


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for path in document["paths"].values() for operation in path.values()]


def _body(operation: dict[str, Any]) -> dict[str, Any]:
    """The schema of an operation's body; {} without one."""
    content = operation.get("requestBody", {}).get("content", {})
    found: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    return found


def _fields(component: dict[str, Any], notes: Mapping[str, str]) -> Iterator[str]:
    required = set(component.get("required", ()))
    if described := cell((component.get("description") or "").split("\n\n")[0]):
        yield described
    rows = [
        (
            f"`{field}`",
            cell(_type(spec)),
            "yes" if field in required else "",
            cell(spec.get("description", "")),
        )
        for field, spec in component["properties"].items()
    ]
    yield table(("field", "type", "required", "meaning"), rows)


def _routes(owner: Any) -> Iterator[Any]:
    """The routes of an application or router, those of included routers too."""
    for route in owner.routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else _routes(included)


def _by_path(route: str) -> tuple[str, str]:
    method, path = route.split(" ")
    return path, method


def _schemas_of(document: dict[str, Any], route: str) -> tuple[str, str]:
    """Links to the schemas of a route's body and of its answer."""
    method, path = route.split(" ", 1)
    operation = document["paths"].get(path, {}).get(method.lower(), {})
    content = operation.get("responses", {}).get("200", {}).get("content", {})
    answer = content.get("application/json", {}).get("schema", {})
    return _link(_body(operation)), _link(answer) or ", ".join(sorted(content))


def _link(schema: dict[str, Any]) -> str:
    names = [schema["title"]] if "properties" in schema else re.findall(r"/schemas/(\w+)", str(schema))
    return ", ".join(f"[{name}](#{anchor(name)})" for name in dict.fromkeys(names))


def _type(spec: dict[str, Any]) -> str:
    """A field's type in words."""
    if "$ref" in spec:
        name = spec["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{anchor(name)})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in spec:
            return " or ".join(dict.fromkeys(_type(each) for each in spec[key]))
    if "const" in spec or "enum" in spec:
        return ", ".join(f"`{value}`" for value in spec.get("enum", [spec.get("const")]))
    kind = spec.get("type", "any")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        return f"list of {_type(spec.get('items', {}))}"
    bounds = [f"{sign} {spec[key]:g}" for key, sign in _BOUNDS.items() if key in spec]
    return " ".join([kind, *bounds])


def request_fields() -> str:
    """Page of the handling of each field of chat requests and completions."""
    return "\n\n".join(
        (
            "How `/v1/chat/completions` and `/v1/completions` handle every field of OpenAI's and vLLM's requests, and "
            "fields of other servers that would change the answer. Fields in no table are ignored.",
            "## Supported",
            table(("field", "at", "what it does"), ((n, at, note) for n, at, _, note in _handled("done"))),
            "## Refused with 400",
            table(("field", "at", "unless it is", "reason"), _handled("refused")),
            "## Ignored",
            table(("field", "reason"), ((n, note) for n, _, _, note in _handled("harmless"))),
        )
    )


def _handled(state: State) -> Iterator[tuple[str, str, str, str]]:
    """(names, endpoint, values that request nothing, note): fields of the same handling share a row."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for field in FIELDS:
        if field.state == state:
            unless = ", ".join(f"`{json.dumps(value)}`" for value in field.harmless)
            where.setdefault((field.name, field.note, unless), []).append(field.endpoint)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (name, note, unless), endpoints in where.items():
        at = "both" if len(endpoints) == len(ENDPOINTS) else endpoints[0]
        rows.setdefault((at, unless, cell(note)), []).append(f"`{name}`")
    for (at, unless, note), names in rows.items():
        yield ", ".join(names), at, unless, note


class _Figures:
    """Stands in for an engine or its statistics: every figure that is not given is 1."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> int:
        return 1


def metrics() -> str:
    """Page of all metrics: those of a server whose engine and database report everything."""
    stats = _Figures(
        placement=_Figures(),
        prefetch={"used": 0},
        dynamic_update={"updated": 1},
        step_tokens={1: 1},
        speculation=_Figures(accepted_by_position=(1,)),
    )
    info = _Figures(
        model="model",
        architecture="",
        accelerator="none",
        clock="wall",
        output_changes=("any",),
        config_json="{}",
    )
    tokenizer = _Figures(chat_template=None, tool_form=None)
    engine: Any = _Figures(
        info=info,
        stats=lambda: stats,
        tokenizer=tokenizer,
        config=_Figures(enable_prefix_caching=False),
        control=_Figures(asleep=False, requests=list),
        pictures=_Figures(stats=_Figures),
        adapters=_Figures(known=lambda: [_Figures(name="name", loaded=_Figures())]),
    )
    sink: Any = _Figures(stats=lambda: _Figures(level="expert", dropped={"ring": 1}))
    source: Any = _Figures(path="model")
    state = ServerState(ServerConfig(), sink, {"model": source})
    state.default.loaded(engine, sink=sink)
    spans: Any = _Figures(counts={"exported": 1})
    state.spans = spans
    state.http.answered["/v1/models", "GET", "2xx"] = 1
    text = TestClient(app_of(state)).get("/metrics", headers={"host": "localhost"}).raise_for_status().text
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    rows = []
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        labels = re.findall(rf"^{name}(?:_bucket)?\{{(.*)\}}", text, re.MULTILINE)
        names = dict.fromkeys(re.findall(r"(\w+)=\"", " ".join(labels)))
        rows.append(
            (f"`{name}`", kind, ", ".join(f"`{each}`" for each in names if each != "le"), cell(helps[name]))
        )
    return "\n\n".join(
        (
            "`GET /metrics` returns these in Prometheus' text format. `vllm:` metrics have vLLM's names, units and "
            "buckets. Metrics of expert slots, records, deferral, dynamic update, speculation, adapters and telemetry "
            "appear only where they are in use.",
            table(("metric", "type", "labels", "meaning"), rows),
        )
    )


def telemetry_tables() -> str:
    """Page of every table and column of the telemetry database."""
    parts = [
        f"Schema version {schema.SCHEMA_VERSION} (`meta`). A server upgrades databases of version "
        f"{migrations.OLDEST} and later; a newer one is refused. Column names carry units; columns `…_s` of moments "
        "are Unix times. In PostgreSQL, tables without a primary key have a column `rowid`, which rises with time. "
        "[What times mean](../guides/telemetry.md#what-times-mean)."
    ]
    for name, made in schema.metadata.tables.items():
        rows = [
            (f"`{c.name}`", str(c.type).lower(), "" if c.nullable else "yes", cell(c.comment or ""))
            for c in made.columns
        ]
        parts += [f"## `{name}`", table(("column", "type", "always set", "meaning"), rows)]
    parts.append(
        "The following are views. They show the events of the tables `…_block` as rows, in plain SQL "
        "([guide](../guides/telemetry.md#query-the-database-with-other-programs))."
    )
    for name, view in schema.views.tables.items():
        rows = [(f"`{c.name}`", str(c.type).lower(), cell(c.comment or "")) for c in view.columns]
        parts += [f"## `{name}` (view)", table(("column", "type", "meaning"), rows)]
    return "\n\n".join(parts)
