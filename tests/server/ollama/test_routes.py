"""Ollama's API, by its own client over a real socket, around the fake engine that says the prompt back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from fake_engine import FakeEngine, WordTokenizer, fake_logprob
from live_server import HTTP, serving
from twofold import __version__
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError
from twofold.api.pooling import ModelPooling
from twofold.api.types import SamplingParams
from twofold.server.app import create_app
from twofold.server.ollama.formats import text_of
from twofold.server.ollama.model_sizes import ModelSizes, model_sizes
from twofold.server.openai.prompts import Prompt, continuing

from tests.tiny_models.writing import write_tiny_model

MODEL = "fake-tales"
TALE = [{"role": "user", "content": "once upon a time"}]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url, trust_env=False, timeout=30) as made:
        yield made


def test_a_chat_answer_has_text_counts_and_nanoseconds(client):
    answer = client.chat(model=MODEL, messages=TALE)
    assert (answer.message.role, answer.message.content) == ("assistant", "once upon a time ")
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", MODEL)
    assert (answer.prompt_eval_count, answer.eval_count) == (4, 4)
    # The fake's clock: a quarter of a second for the prompt, half of one for the answer.
    assert (answer.prompt_eval_duration, answer.eval_duration) == (250_000_000, 500_000_000)
    assert 0 < answer.total_duration < 30e9


@pytest.mark.parametrize("raw", [None, True])
def test_generate_takes_a_prompt_with_and_without_the_template(client, engine, raw):
    answer = client.generate(model=f"{MODEL}:latest", prompt="once upon", system="be brief", raw=raw)
    assert answer.response == ("once upon " if raw else "be brief once upon ")
    assert engine.requests[0].endpoint == ("completions" if raw else "chat.completions")
    long = " ".join(f"w{number}" for number in range(30))
    assert client.generate(model=MODEL, prompt=long, raw=raw).eval_count == 30, "no limit of its own"


def test_a_stream_is_lines_of_json_and_the_last_one_is_done(client, url):
    *middle, last = client.chat(model=MODEL, messages=TALE, stream=True)
    assert [chunk.message.content for chunk in middle] == ["once ", "upon ", "a ", "time "]
    assert not any(chunk.done for chunk in middle)
    assert (last.message.content, last.done, last.done_reason, last.eval_count) == ("", True, "stop", 4)
    assert (
        "".join(chunk.response for chunk in client.generate(model=MODEL, prompt="a b", stream=True)) == "a b "
    )
    # Ollama streams by default.
    with HTTP.stream("POST", f"{url}/api/chat", json={"model": MODEL, "messages": TALE}) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        assert [json.loads(line)["done"] for line in response.iter_lines()] == [False] * 4 + [True]


def test_options_are_the_requests_own(client, engine):
    options = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.05,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 5,
        "stop": ["x", "y"],
        "num_predict": 2,
        "num_ctx": 64,
        "num_thread": 8,
        "mirostat": 0,
    }
    assert client.chat(model=MODEL, messages=TALE, options=options, keep_alive="5m").done_reason == "length"
    sampling: SamplingParams = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.8, 7, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.5)
    assert (sampling.frequency_penalty, sampling.seed) == (0.25, 5)
    assert (sampling.stop, sampling.max_tokens) == (("x", "y"), 2)
    client.chat(model=MODEL, messages=TALE, options={"num_predict": -1, "stop": "z"})
    assert (engine.requests[1].sampling.max_tokens, engine.requests[1].sampling.stop) == (60, ("z",))


@pytest.mark.parametrize("limit", ["max_output_tokens", "max_tokens"])
@pytest.mark.parametrize("raw", [None, True])
def test_sampling_fields_beside_the_options_act_too(url, engine, limit, raw):
    """As ollama-ai-provider-v2 sends them. A field of the options goes first."""
    top_level = {"temperature": 0.3, "top_p": 0.8, "stop": ["x"], "seed": 4, limit: 2}
    body = {"model": MODEL, "prompt": "a b c", "raw": raw, "options": {"seed": 5}} | top_level
    assert HTTP.post(f"{url}/api/generate", json=body).status_code == 200
    sampling: SamplingParams = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.3, 0.8, ("x",))
    assert (sampling.seed, sampling.max_tokens) == (5, 2)
    assert HTTP.post(f"{url}/api/generate", json=body | {"options": [1]}).status_code == 400


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gpt-9"}, "'gpt-9' does not exist here"),
        ({"model": ""}, "model"),
        ({"messages": [{"role": "", "content": "4"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "reads text only"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "--tool-call-parser"),
        ({"tools": [{"type": "function"}]}, "needs an object in 'function'"),
        ({"think": True}, "does not support thinking"),
        ({"think": "x" * 65}, "think"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": {"temperature": "hot"}}, "temperature"),
        ({"options": {"stop": ["a"] * 1025}}, "at most 1024"),
        ({"messages": [{"role": "user", "content": "word " * 64}]}, "64 tokens"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "refused the conversation"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_requests_get_ollamas_errors(shared, changes, words, stream):
    url, engine = shared
    response = HTTP.post(
        f"{url}/api/chat", json={"model": MODEL, "messages": TALE, "stream": stream} | changes
    )
    assert response.status_code in (400, 404)
    assert set(response.json()) == {"error"}
    assert words in response.json()["error"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "schema", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}, {}, "yaml"]
)
def test_format_is_done_or_refused_as_response_format_is(url, schema):
    named = {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}
    form = {"type": "json_object"} if schema == "json" else named
    there = HTTP.post(f"{url}/v1/chat/completions", json={"messages": TALE, "response_format": form})
    here = HTTP.post(
        f"{url}/api/chat", json={"model": MODEL, "messages": TALE, "format": schema, "stream": False}
    )
    assert here.status_code == there.status_code
    if here.status_code != 200:
        assert there.json()["error"]["param"].partition(".")[0] in here.json()["error"]


def test_generate_refuses_what_it_would_ignore(client):
    with pytest.raises(ollama.ResponseError, match="template: not supported") as caught:
        client.generate(model=MODEL, prompt="a", template="b")
    assert caught.value.status_code == 400
    for field in ({"raw": True}, {"suffix": "b"}):
        with pytest.raises(ollama.ResponseError, match=f"{next(iter(field))}: not supported beside context"):
            client.generate(model=MODEL, prompt="a", context=[1, 2], **field)
    with pytest.raises(ollama.ResponseError, match="prompt is too long: 64 tokens"):
        client.generate(model=MODEL, prompt="a", context=[1] * 64)


def test_num_ctx_is_cut_to_the_servers_context(client, engine):
    assert client.chat(model=MODEL, messages=TALE, options={"num_ctx": 131_072}).done_reason == "stop"
    assert engine.requests[0].sampling.max_tokens == 60


@pytest.mark.parametrize("stream", [False, True])
def test_context_carries_a_conversation_on(client, engine, stream):
    def generate(prompt: str, **options: Any) -> Any:
        answer = client.generate(model=MODEL, prompt=prompt, stream=stream, **options)
        if not stream:
            return answer
        *middle, last = answer
        assert not any(chunk.context for chunk in middle)
        return last

    words = engine.tokenizer.encode("a b c")
    first = generate("a b")
    assert first.context == [*words[:2], *words[:2]], "the prompt and the answer, which says it back"
    second = generate("c", context=first.context)
    assert engine.requests[1].prompt_token_ids == (*first.context, words[2])
    assert (second.prompt_eval_count, second.context[:5]) == (5, [*first.context, words[2]])
    assert generate("c", raw=True).context is None, "Ollama gives none either"


def test_a_begin_of_text_token_stays_at_the_beginning_only():
    class Beginning(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [7] * add_special_tokens + super().encode(text)

    prompt = Prompt((7, 3, 4), turn_ends=(2,))
    assert continuing([7, 1, 2], prompt, Beginning()) == Prompt((7, 1, 2, 3, 4), turn_ends=(4,))
    assert continuing([1, 2], prompt, Beginning()) == Prompt((1, 2, 7, 3, 4), turn_ends=(4,))
    assert continuing([7, 1], prompt, WordTokenizer()) == Prompt((7, 1, 7, 3, 4), turn_ends=(4,))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", ["chat", "generate", "raw"])
def test_log_probabilities_accompany_the_text(client, engine, ask, stream):
    def entries(**options: Any) -> list[Any]:
        kind = {"messages": TALE} if ask == "chat" else {"prompt": "once upon a time", "raw": ask == "raw"}
        method = client.chat if ask == "chat" else client.generate
        answer = method(model=MODEL, stream=stream, **kind, **options)
        parts = list(answer) if stream else [answer]
        return [entry for part in parts for entry in part.logprobs or ()]

    reported = entries(logprobs=True, top_logprobs=2)
    assert [entry.token for entry in reported] == ["once ", "upon ", "a ", "time "]
    ids = engine.tokenizer.encode("once upon a time")
    assert [entry.logprob for entry in reported] == [fake_logprob(token_id, 0).logprob for token_id in ids]
    assert [len(entry.top_logprobs) for entry in reported] == [2] * 4
    assert [entry.token for entry in entries(logprobs=True)] == [entry.token for entry in reported]
    assert entries() == entries(top_logprobs=3) == []


def test_failures_are_reported_in_and_before_a_stream(client, engine):
    engine.fail_after_words = 2
    received = []
    with pytest.raises(ollama.ResponseError, match="failed in layer 3"):
        received.extend(
            chunk.message.content for chunk in client.chat(model=MODEL, messages=TALE, stream=True)
        )
    assert received == ["once ", "upon "]
    with pytest.raises(ollama.ResponseError, match="failed in layer 3") as caught:
        client.chat(model=MODEL, messages=TALE)
    assert caught.value.status_code == 500
    engine.fail_on_submit = CapacityError("all places are taken", retry_after_s=2)
    with pytest.raises(ollama.ResponseError, match="all places are taken") as caught:
        client.chat(model=MODEL, messages=TALE)
    assert caught.value.status_code == 429


def test_an_empty_request_reports_the_loaded_model(client, engine):
    assert client.generate(model=MODEL).done_reason == "load"
    assert client.chat(model=MODEL, messages=[], keep_alive=0).done_reason == "unload"
    assert engine.requests == []


def test_thinking_is_the_templates_own_variable(client, engine, url):
    assert client.chat(model=MODEL, messages=TALE, think="low").message.content.startswith(
        "reasoning_effort=low "
    )
    more = HTTP.post(
        f"{url}/api/chat", json={"model": MODEL, "messages": TALE, "think": "max", "stream": False}
    )
    assert more.json()["message"]["content"].startswith("reasoning_effort=max ")
    assert client.chat(model=MODEL, messages=TALE, think=False).message.content == "once upon a time "
    engine.tokenizer.template_variables = frozenset({"enable_thinking"})
    assert client.chat(model=MODEL, messages=TALE, think=True).message.content.startswith(
        "enable_thinking=True "
    )


SAYS = [
    "<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"war", "mth\", \"arguments\": {\"city\": \"Bri",
    "g\"}}\n</tool_call>\n<tool_call>{\"name\": \"cold\", \"arguments\": {}}</tool_call>",
    '<tool_call>{"name": "cut", "arguments": {"a": 1}',
]  # fmt: skip


def test_tools_and_thinking_come_in_a_round(engine: FakeEngine):
    def warmth(city: str) -> str:
        """How warm it is.

        Args:
            city: where
        """
        return city

    engine.max_context, engine.says = 4096, SAYS
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    with (
        serving(create_app(engine, config)) as url,
        ollama.Client(host=url, trust_env=False, timeout=30) as client,
    ):
        assert client.show(MODEL).capabilities == ["completion", "embedding", "tools", "thinking"]
        answer = client.chat(model=MODEL, messages=TALE, tools=[warmth], think=True)
        pieces = list(client.chat(model=MODEL, messages=TALE, tools=[warmth], stream=True))
        streamed = [call for piece in pieces for call in piece.message.tool_calls or ()]
        for calls in (answer.message.tool_calls, streamed):
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                ("warmth", {"city": "Brig"}),
                ("cold", {}),
            ]
        assert (answer.message.thinking, answer.done_reason, pieces[-1].done_reason) == ("hm", "stop", "stop")
        text = "".join(piece.message.content or "" for piece in pieces)
        assert text == answer.message.content == f"Let me see.{SAYS[-1]}", "a call that is cut off is text"
        assert client.chat(model=MODEL, messages=TALE, think=False).message.thinking is None
        results = [{"role": "tool", "tool_name": name, "content": name} for name in ("cold", "warmth")]
        client.chat(model=MODEL, messages=[*TALE, answer.message, *results], tools=[warmth])
    turns, (tool,) = engine.tokenizer.rendered
    assert tool["function"]["parameters"]["properties"]["city"]["type"] == "string"
    calls = turns[1]["tool_calls"]
    assert calls[0]["function"] == {"name": "warmth", "arguments": {"city": "Brig"}}
    assert turns[1]["reasoning_content"] == "hm"
    assert [turn["tool_call_id"] for turn in turns[2:]] == [calls[1]["id"], calls[0]["id"]]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", ["warmth", "cold"]),
        ({"type": "function", "name": "cold"}, ["cold"]),
        ({"type": "function", "function": {"name": "cold"}}, ["cold"]),
        ("auto", None),
        (None, None),
    ],
)
def test_a_tool_can_be_forced(engine: FakeEngine, choice, forced):
    """Ollama has no tool_choice; AI SDK's provider sends it and fails if no call comes."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("warmth", "cold")]
    body = {"model": MODEL, "messages": TALE, "tool_choice": choice}
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as url:
        assert HTTP.post(f"{url}/api/chat", json=body | {"tools": tools}).status_code == 200
        grammar = repr(engine.requests[-1].constraint)
        assert [name for name in ("warmth", "cold") if name in grammar] == (forced or [])
        assert HTTP.post(f"{url}/api/chat", json=body | {"tools": []}).status_code == 200
        wrong = HTTP.post(f"{url}/api/chat", json=body | {"tools": tools, "tool_choice": "sometimes"})
        assert (wrong.status_code, "tool_choice" in wrong.json()["error"]) == (400, True)


def test_reasoning_is_returned_with_the_text():
    assert text_of({"delta": {"reasoning": "hm"}}, "response") == {"response": "", "thinking": "hm"}
    assert text_of({"message": {"content": "a", "reasoning": None}}, "content") == {"content": "a"}


def test_a_model_without_embeddings_has_no_such_capability(client, engine):
    engine.pooling = ModelPooling(size=3, refusal="its Dense module is not computed")
    assert client.show(MODEL).capabilities == ["completion"]


def test_the_model_is_listed_and_shown(client, url):
    (model,) = client.list().models
    assert model.model == MODEL
    shown = client.show(MODEL)
    assert shown.template == "{{ messages }}"
    assert shown.modelinfo["FakeForCausalLM.context_length"] == 64
    assert "temperature 1.0" in shown.parameters
    assert shown.capabilities == ["completion", "embedding"]
    assert "/models/" not in shown.model_dump_json()
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.show("other")
    assert shown.modelinfo["general.basename"] == MODEL, "the name that VS Code shows"
    reported = HTTP.get(f"{url}/api/version").json()
    assert reported["twofold_version"] == __version__
    assert tuple(map(int, reported["version"].split("."))) >= (0, 6, 4), "what VS Code asks for"
    assert HTTP.get(f"{url}/api/nothing").json()["error"].startswith("there is nothing at '/api/nothing'")


def test_options_without_an_equal_are_ignored_with_one_line(client, caplog):
    for _ in range(2):
        client.chat(model=MODEL, messages=TALE, options={"mirostat": 1, "tfs_z": 0.7, "typical_p": 1.0})
    lines = [record.message for record in caplog.records if "is ignored" in record.message]
    assert len(lines) <= 2
    assert not any("typical_p" in line for line in lines), "1 is off"


def test_a_served_model_needs_no_download(client):
    assert [step.status for step in client.pull(MODEL, stream=True)] == ["pulling manifest", "success"]
    assert client.pull(f"{MODEL}:latest").status == "success"
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.pull("other")


def test_sizes_come_from_the_files(tmp_path):
    write_tiny_model(tmp_path / "a")
    sizes = model_sizes(tmp_path / "a", 0.0)
    assert sizes.num_parameters > 10_000
    assert sizes.text.endswith("K")
    assert sizes.format in ("BF16", "F32", "F16")
    assert model_sizes(tmp_path / "none", 0.0).text == ""
    assert (ModelSizes(30_532_122_624).text, ModelSizes(751_632_384).text) == ("30.5B", "752M")


def test_the_model_is_loaded_and_stays(client, engine):
    (process,) = client.ps().models
    assert (process.model, process.name, process.context_length) == (MODEL, MODEL, 64)
    assert process.size_vram == engine.info.num_slots * engine.info.expert_bytes > 0
    assert process.expires_at.year > 2300
    assert process.digest == client.list().models[0].digest


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
def test_a_server_is_found_by_head_and_get(url, path):
    got, requested = HTTP.get(url + path), HTTP.head(url + path)
    assert (got.status_code, requested.status_code, requested.content) == (200, 200, b"")
    for header in ("content-type", "content-length"):
        assert requested.headers[header] == got.headers[header]
    if path == "/":
        assert (got.text, got.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")


def test_every_call_of_the_asynchronous_client(url):
    async def ask() -> list[Any]:
        async with ollama.AsyncClient(host=url, trust_env=False, timeout=30) as client:
            chat = await client.chat(model=MODEL, messages=TALE, logprobs=True)
            pieces = [piece async for piece in await client.chat(model=MODEL, messages=TALE, stream=True)]
            first = await client.generate(model=MODEL, prompt="a b")
            second = [
                piece
                async for piece in await client.generate(
                    model=MODEL, prompt="c", context=first.context, stream=True
                )
            ]
            cards = [(await client.list()).models[0].model, (await client.ps()).models[0].model]
            shown = await client.show(MODEL)
        return [
            chat.message.content,
            len(chat.logprobs),
            "".join(piece.message.content for piece in pieces),
            "".join(piece.response for piece in second),
            cards,
            shown.capabilities,
        ]

    tale = "once upon a time "
    assert asyncio.run(ask()) == [tale, 4, tale, "a b a b c ", [MODEL, MODEL], ["completion", "embedding"]]


def test_a_key_is_needed_where_the_others_need_it(engine: FakeEngine):
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        with (
            ollama.Client(host=url, trust_env=False) as client,
            pytest.raises(ollama.ResponseError, match="API key"),
        ):
            client.list()
        headers = {"authorization": "Bearer sesame"}
        assert HTTP.get(f"{url}/").text == "Ollama is running", "it is asked without a key"
        with ollama.Client(host=url, trust_env=False, headers=headers) as client:
            assert client.list().models[0].model == MODEL
