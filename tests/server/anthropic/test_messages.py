"""Anthropic's Messages API, by its own client over a real socket, around the fake engine that says the prompt back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError
from twofold.server.app import create_app
from twofold.text.tokenizer import ToolForm

TALE: list[Any] = [{"role": "user", "content": "once upon a time"}]
TOOL: dict[str, Any] = {
    "name": "warmth",
    "description": "°C",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SAYS = [
    "<thi", "nk>\nI should", " look.\n</think>\n\nLet", " me see.\n<tool", "_call>\n{\"name\": \"war",
    "mth\", \"arguments\": {\"city\": \"Bri", "g\"}}\n</tool_call>\n<tool_call>{\"name\": \"cold\", ",
    "\"arguments\": {}}</tool_call>",
]  # fmt: skip
NAMES = ("fake", "claude-tales", "claude-small")
THINKS = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    engine.max_context = 4096
    config = ServerConfig(
        tool_call_parser="hermes", reasoning_parser="qwen3", served_model_name=(NAMES[0], ",".join(NAMES[1:]))
    )
    with serving(create_app(engine, config)) as base:
        yield base


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, FakeEngine]]:
    """Shared server for requests that do not reach the engine."""
    engine = FakeEngine(max_context=256)
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as base:
        yield base, engine
    engine.close()


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=30) as made:
        yield made


def ask(client: Any, **more: Any) -> Any:
    return client.messages.create(**{"model": "claude-tales", "max_tokens": 64, "messages": TALE} | more)


def streamed(client: Any, **more: Any) -> tuple[Any, list[Any]]:
    """The message that the client assembles, and the events."""
    requested = {"model": "claude-tales", "max_tokens": 64, "messages": TALE} | more
    with client.messages.stream(**requested) as stream:
        events = [
            event for event in stream if event.type not in ("text", "thinking", "input_json", "signature")
        ]
        return stream.get_final_message(), events


def blocks(message: Any) -> list[dict[str, Any]]:
    """Content without random ids."""
    reply = [block.to_dict() for block in message.content]
    return [
        {name: held for name, held in block.items() if name not in ("id", "signature")} for block in reply
    ]


def test_an_answer_has_text_a_reason_and_counts(engine, client):
    sampled = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    answer = ask(client, system="be brief", metadata={"user_id": "u"}, extra_body=sampled)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "claude-tales")
    assert answer.id.startswith("msg_")
    assert [block.text for block in answer.content] == ["be brief once upon a time "]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    # The fake's cache knows all but the last token.
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 5, 6)
    assert usage.cache_creation_input_tokens == 0


def test_a_stream_has_the_same_content_in_its_events(client, engine, url):
    whole, (final, events) = ask(client), streamed(client)
    assert blocks(final) == blocks(whole)
    assert final.usage.to_dict() == whole.usage.to_dict()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens == 4
    async_client = anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0)

    async def once() -> str:
        async with (
            async_client as made,
            made.messages.stream(model="fake", max_tokens=2, messages=TALE) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(once()) == "once upon "
    assert engine.requests[-1].sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("more", "thinking", "calls"),
    [
        ({"thinking": THINKS}, True, ["warmth", "cold"]),
        ({"thinking": {"type": "adaptive"}}, True, ["warmth", "cold"]),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, False, ["warmth", "cold"]),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, True, ["warmth", "cold"]),
        ({"thinking": {"type": "disabled"}}, False, ["warmth", "cold"]),
        ({}, False, ["warmth", "cold"]),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, False, ["warmth"]),
    ],
)
def test_thinking_text_and_calls_are_blocks_whole_and_in_a_stream(engine, client, more, thinking, calls):
    engine.says = SAYS
    answer = ask(client, tools=[TOOL], **more)
    (final, events) = streamed(client, tools=[TOOL], **more)
    reply = blocks(answer)
    assert blocks(final) == reply
    for counted in (answer.usage, final.usage):
        assert counted.output_tokens > counted.output_tokens_details.thinking_tokens > 0, (
            "counted if hidden, too"
        )
    kinds = ["thinking"] * thinking + ["text"] + ["tool_use"] * len(calls)
    assert [block["type"] for block in reply] == kinds
    assert reply[kinds.index("text")]["text"] == "Let me see."
    used = reply[kinds.index("tool_use") :]
    assert [block["name"] for block in used] == calls
    assert used[0]["input"] == {"city": "Brig"}
    if thinking:
        assert reply[0]["thinking"] == "I should look."
        assert all(message.content[0].signature for message in (answer, final))
    assert answer.stop_reason == final.stop_reason == "tool_use"
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert (
        starts
        == [event.index for event in events if event.type == "content_block_stop"]
        == list(range(len(kinds)))
    )
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert pieces == ['{"city": "Bri', 'g"}', "{}"][: 2 * len(calls) - (len(calls) > 1)]


def test_a_round_of_tools_reaches_the_template_as_a_chats_does(engine, client):
    engine.says = SAYS
    messages: list[Any] = list(TALE)
    answer = ask(client, messages=messages, tools=[TOOL], thinking=THINKS)
    uses = [block for block in answer.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": [{"type": "text", "text": "20"}]},
        {"type": "tool_result", "tool_use_id": uses[1].id, "content": "no such", "is_error": True},
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=9; cch=1f;"},
        {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    again = ask(
        client, system=system, messages=messages, tools=[TOOL | {"cache_control": {"type": "ephemeral"}}]
    )
    turns, tools = engine.tokenizer.rendered
    parameters = TOOL["input_schema"]
    function = {"name": "warmth", "description": "°C", "parameters": parameters}
    assert list(tools) == [{"type": "function", "function": function}]
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("system", "be brief"),
        ("user", "once upon a time"),
        ("assistant", "Let me see."),
        ("tool", "20"),
        ("tool", "Error: no such"),
        ("user", "go on"),
    ]
    assert turns[2]["reasoning_content"] == "I should look."
    assert [call["function"]["arguments"] for call in turns[2]["tool_calls"]] == [{"city": "Brig"}, {}]
    assert [turn["tool_call_id"] for turn in turns[3:5]] == [use.id for use in uses]
    counted = client.messages.count_tokens(model="fake", system=system, messages=messages, tools=[TOOL])
    assert counted.input_tokens == again.usage.input_tokens + again.usage.cache_read_input_tokens > 6


def test_the_last_turn_of_an_assistant_is_continued(engine, client):
    turns: list[Any] = [
        *TALE,
        *TALE,
        {"role": "assistant", "content": [{"type": "text", "text": "there was"}]},
    ]
    assert ask(client, messages=turns).content[0].text.endswith("there was CONTINUE ")
    assert [turn["content"] for turn in engine.tokenizer.rendered[0]] == [
        "once upon a time\nonce upon a time",
        "there was",
    ]


def test_the_finish_reason_of_an_answer(engine, client):
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"
    warmed = ask(client, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    engine.stopped_by = "END"
    stops = [f"S{number}" for number in range(8)]
    for answer in (ask(client, stop_sequences=stops), streamed(client, stop_sequences=stops)[0]):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert engine.requests[-1].sampling.stop == tuple(stops)


def test_thinking_effort_and_form_are_the_chats_own(engine, client):
    engine.tokenizer.template_variables = frozenset({"enable_thinking", "reasoning_effort", "tools"})
    effort = {"output_config": {"effort": "max"}}
    reply = ask(client, thinking=THINKS, **effort).content[0].text
    assert reply.startswith("enable_thinking=True reasoning_effort=high ")
    assert ask(client).content[0].text.startswith("enable_thinking=False once")
    engine.tokenizer.template_variables = frozenset({"thinking"})
    assert ask(client, thinking=THINKS, **effort).content[0].text.startswith("thinking=True once")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    constraint = engine.requests[-1].constraint.constraint
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", schema)


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALLS = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "gpt-9"}, 404, "'gpt-9' does not exist here"),
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop_sequences": ["a"] * 1025}, 400, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "mcp_servers: not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "reads text only",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 400, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": CALLS["content"]}]}, 400, "role 'assistant'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "messages[0].role"),
        ({"tools": [SEARCH]}, 400, "only Anthropic's servers run"),
        (
            {"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
            400,
            "only Anthropic's",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "input_schema"),
        ({"tools": [{"name": "f"}]}, 400, "input_schema"),
        (
            {"messages": [{"role": "user", "content": "word " * 300}]},
            400,
            "prompt is too long: 300 tokens > 255 maximum",
        ),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, 400, "refused the conversation"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_an_error_in_anthropics_shape(shared, changes, status, words, stream):
    url, engine = shared
    body = {"model": "fake-tales", "max_tokens": 9, "messages": TALE, "stream": stream} | changes
    response = HTTP.post(f"{url}/v1/messages", json=body)
    assert response.status_code == status, response.text
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert response.json() == {
        "type": "error",
        "error": {"type": kind, "message": response.json()["error"]["message"]},
    }
    assert words in response.json()["error"]["message"]
    assert engine.requests == []
    counted = HTTP.post(f"{url}/v1/messages/count_tokens", json=body).status_code
    only_of_answers = changes.keys() & {"max_tokens", "temperature", "stop_sequences"} or "too long" in words
    assert counted == (200 if only_of_answers else status)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "warmth"}, {"type": "none"}])
def test_a_call_can_be_forced(engine, client, choice):
    engine.says = SAYS[3:-2]
    ask(client, tools=[TOOL], tool_choice=choice)
    constraint = engine.requests[-1].constraint
    assert (constraint is None) == (choice["type"] == "none")
    assert constraint is None or "warmth" in constraint.constraint.constraint.text
    assert (engine.tokenizer.rendered[1] is None) == (choice["type"] == "none")


def test_tools_of_anthropics_servers_beside_others_are_left_out(engine, client):
    ask(client, tools=[SEARCH, TOOL])
    assert [tool["function"]["name"] for tool in engine.tokenizer.rendered[1]] == ["warmth"]


def test_failures_are_reported_in_and_before_a_stream(engine, client, url):
    engine.fail_after_words = 2
    received: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError, match="failed in layer 3") as caught,
        client.messages.stream(model="fake", max_tokens=9, messages=TALE) as stream,
    ):
        received.extend(stream.text_stream)
    assert "".join(received) == "once upon "
    assert caught.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.InternalServerError, match="failed in layer 3"):
        ask(client)
    engine.says, engine.fail_after_words = ["ok <tool_call>", '{"name": "war', "never"], 2
    body = {"model": "fake", "max_tokens": 9, "messages": TALE, "tools": [TOOL], "stream": True}
    text = HTTP.post(f"{url}/v1/messages", json=body).text
    reply = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"]["text"] for event in reply if event["type"] == "content_block_delta"]
    assert "".join(pieces) == 'ok <tool_call>{"name": "war'
    assert reply[-1]["type"] == "error"


def test_the_client_retries_when_places_are_taken(engine, url):
    engine.fail_on_submit = CapacityError("all places are taken", retry_after_s=0.1)
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0, timeout=30) as client:
        with pytest.raises(anthropic.RateLimitError, match="all places are taken"):
            ask(client)
        engine.fail_on_submit = CapacityError("draining", draining=True)
        with pytest.raises(anthropic.APIStatusError) as caught:
            ask(client)
        assert (caught.value.status_code, caught.value.body["error"]["type"]) == (529, "overloaded_error")
        assert "retry-after" in caught.value.response.headers
        failures = iter([CapacityError("once more", retry_after_s=0.1)])
        submit, engine.fail_on_submit = engine.submit, None

        def fails_once(request: Any) -> None:
            for failure in failures:
                raise failure
            submit(request)

        engine.submit = fails_once
        answer = ask(client.with_options(max_retries=2))
    assert answer.content[0].text == "once upon a time "


def test_any_configured_name_is_served_and_listed(url, client):
    listed = HTTP.get(f"{url}/v1/models").json()
    assert (
        [card["id"] for card in listed["data"]] == [card["name"] for card in listed["models"]] == list(NAMES)
    )
    for model in client.models.list():
        assert (model.type, model.display_name, model.lifecycle) == ("model", model.id, "active")
        assert model.created_at.tzinfo is not None
    page = client.models.list()
    assert [model.id for model in page] == list(NAMES)
    assert (page.first_id, page.last_id, page.has_next_page()) == (NAMES[0], NAMES[-1], False)
    assert client.models.retrieve(NAMES[1]).display_name == NAMES[1]
    for name in NAMES:
        assert ask(client, model=name).model == name
        assert HTTP.get(f"{url}/v1/models/{name}").json()["id"] == name
        assert HTTP.post(f"{url}/api/show", json={"model": f"{name}:latest"}).status_code == 200


def test_either_header_holds_the_key(engine):
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        for key in ({"api_key": "sesame"}, {"auth_token": "sesame"}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **key) as client:
                assert ask(client, model="fake-tales").content[0].text == "once upon a time "
        with (
            anthropic.Anthropic(base_url=url, api_key="open", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            ask(client, model="fake-tales")
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_large_conversations_cross_to_the_process_that_parses(engine, url):
    text = "x" * 50_000
    engine.tokenizer.tool_form = ToolForm(False, False, True)
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": text}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": text}]}
    turns = [*TALE, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    body = {"model": "fake", "max_tokens": 9, "messages": turns, "tools": [TOOL]}
    response = HTTP.post(
        f"{url}/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x-2026-01-01"}
    )
    assert response.status_code == 200, response.text
    rendered = engine.tokenizer.rendered[0]
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == {"a": text}
    assert rendered[2]["content"] == text
