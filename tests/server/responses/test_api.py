"""/v1/responses through OpenAI's client over a real socket, with the fake engine's prescribed answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from live_server import serving
from openai.types.responses import Response
from responses_play import CALLS, MCP_HEAD, TOOL, USER, events_of, post
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError
from twofold.server.app import create_app
from twofold.server.responses.input import opened, sealed
from twofold.text.tokenizer import ToolForm

MODEL = "fake-tales"
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}
MCP = MCP_HEAD | {"tools": [TOOL, PATCH]}
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
SAYS = ["<thi", "nk>\nI should", " look.\n</think>\n\nLet", " me see.\n<tool", '_call>{"name": "war',
        'mth", "arguments": {"city": "Bri', 'g"}}</tool_call>']  # fmt: skip


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    engine.max_context = 4096
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    with serving(create_app(engine, config)) as base:
        yield base


def reply(items: list[dict[str, Any]]) -> list[Any]:
    """Items without what is another in each answer."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together; every begin must have its end, one item after the other."""
    done: list[dict[str, Any]] = []
    text, open_id = "", ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not open_id
            assert event["output_index"] == len(done)
            open_id, text = event["item"]["id"], ""
            assert event["item"]["status"] == "in_progress"
        elif kind == "output_item.done":
            assert event["item"]["id"] == open_id
            done.append(event["item"])
            open_id = ""
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (open_id, len(done))
            text += event.get("delta", "")
            whole = event.get("text", event.get("arguments", event.get("input")))
            assert whole is None or whole == text
    assert not open_id
    return done


def test_whole_and_streamed_answers_are_the_same_object(url: str, engine: FakeEngine) -> None:
    engine.says = SAYS
    requested = {"input": "How warm is it?", "tools": [TOOL], "metadata": {"a": "b"}, "store": True}
    whole = post(url, **requested).json()
    Response.model_validate(whole, strict=True)
    events = events_of(url, **requested)
    kinds = [event["type"].removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *part,
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        *end,
        *part,
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        *end,
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1]["response"]
    assert rebuilt(events) == last["output"]
    assert reply(last["output"]) == reply(whole["output"])
    assert {key: last[key] for key in last.keys() - {"id", "output", "created_at", "completed_at"}} == {
        key: whole[key] for key in whole.keys() - {"id", "output", "created_at", "completed_at"}
    }
    thinking, message, call = whole["output"]
    assert (thinking["content"][0]["text"], message["content"][0]["text"]) == (
        "I should look.",
        "Let me see.",
    )
    assert (call["name"], call["arguments"]) == ("warmth", '{"city": "Brig"}')
    assert (whole["store"], whole["metadata"], whole["status"]) == (True, {"a": "b"}, "completed")
    assert whole["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


@pytest.mark.parametrize(
    ("requested", "num_top"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
        ({}, None),
    ],
)
def test_log_probabilities_are_those_of_the_messages_tokens(
    url: str, engine: FakeEngine, requested: dict[str, Any], num_top: int | None
) -> None:
    engine.says = SAYS
    requested = {"input": "How warm is it?", "tools": [TOOL]} | requested
    whole = post(url, **requested).json()
    Response.model_validate(whole, strict=True)
    events = events_of(url, **requested)
    (message,) = (item for item in whole["output"] if item["type"] == "message")
    (part,) = message["content"]
    # The third and fourth pieces of the answer hold the message's text.
    expected = [] if num_top is None else [-0.25 * (piece + 1) for piece in (3, 4)]
    assert [entry["logprob"] for entry in part["logprobs"]] == expected
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [num_top] * len(expected)
    assert whole["top_logprobs"] == (num_top or 0)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == part["logprobs"]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    assert reply(rebuilt(events)) == reply(whole["output"])


def test_thinking_is_returned_as_summary_and_sealed(url: str, engine: FakeEngine) -> None:
    engine.says = SAYS[:3]
    requested = {"input": "a", "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    events = events_of(url, **requested)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[3:8] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    thinking = rebuilt(events)[0]
    assert (thinking["summary"], thinking["content"]) == (
        [{"type": "summary_text", "text": "I should look."}],
        [],
    )
    # What Codex sends back: no content, and maybe no summary.
    for reported in ({"summary": thinking["summary"]}, {"encrypted_content": thinking["encrypted_content"]}):
        item = {"type": "reasoning", "summary": [], **reported}
        post(url, input=[{"role": "user", "content": "a"}, item, {"role": "assistant", "content": "b"}])
        assert engine.tokenizer.rendered[0][1]["reasoning_content"] == "I should look."
    assert [opened(text) for text in ("gAAAA-openai's", "twofold1:?", sealed("ä"))] == ["", "", "ä"]


@pytest.mark.parametrize(
    ("tool", "name", "item"),
    [
        (TOOL, "warmth", {"type": "function_call", "name": "warmth", "arguments": '{"input": "+a"}'}),
        (PATCH, "patch", {"type": "custom_tool_call", "name": "patch", "input": "+a"}),
        (
            MCP,
            "mcp__files__patch",
            {"type": "custom_tool_call", "name": "patch", "input": "+a", "namespace": "mcp__files"},
        ),
        (
            MCP | {"name": "mcp__files__"},
            "mcp__files__warmth",
            {
                "type": "function_call",
                "name": "warmth",
                "arguments": '{"input": "+a"}',
                "namespace": "mcp__files__",
            },
        ),
    ],
)
@pytest.mark.parametrize("brought", [False, True])
def test_calls_have_the_clients_form_and_are_accepted_back(
    url: str, engine: FakeEngine, tool: dict[str, Any], name: str, item: dict[str, Any], brought: bool
) -> None:
    engine.says = [CALL % (name, '{"input": "+a"}')]
    ignored = {"type": "web_search"}
    user = {"role": "user", "content": "a"}
    offered: dict[str, Any] = {"tools": [ignored, tool], "input": [user]}
    if brought:
        offered = {"input": [{"type": "additional_tools", "role": "developer", "tools": [tool]}, user]}
    response = post(url, **offered).json()
    assert reply(response["output"]) == [{"status": "completed"} | item]
    assert response["tools"] == [tool]
    names = [reported["function"]["name"] for reported in engine.tokenizer.rendered[1]]
    assert name in names
    assert reply(rebuilt(events_of(url, **offered))) == reply(response["output"])
    call = response["output"][0]
    output = {"type": call["type"] + "_output", "call_id": call["call_id"], "output": "warm"}
    post(url, input=[user, call, output], tools=[tool])
    _, answer, result = engine.tokenizer.rendered[0]
    assert answer["tool_calls"][0]["function"] == {"name": name, "arguments": {"input": "+a"}}
    assert (result["role"], result["content"]) == ("tool", "warm")
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"] == call["call_id"]


def test_a_damaged_call_is_never_done(url: str, engine: FakeEngine) -> None:
    engine.says = ["ok ", '<tool_call>{"name": "warmth", "arguments": {"ci', 'ty": ']
    whole = post(url, input="a", tools=[TOOL]).json()
    assert [item["type"] for item in whole["output"]] == ["message"]
    assert whole["output"][0]["content"][0]["text"] == "".join(engine.says)
    events = events_of(url, input="a", tools=[TOOL])
    items = rebuilt(events)
    assert [(item["type"], item["status"]) for item in items] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert "response.function_call_arguments.done" not in [event["type"] for event in events]
    assert items[0]["content"][0]["text"] + items[2]["content"][0]["text"] == "".join(engine.says)


def test_one_call_where_one_is_allowed(url: str, engine: FakeEngine) -> None:
    engine.says = [CALL % ("warmth", "{}"), CALL % ("warmth", '{"a": 1}')]
    for parallel, count in ((True, 2), (False, 1)):
        requested = {"input": "a", "tools": [TOOL], "parallel_tool_calls": parallel}
        assert len(post(url, **requested).json()["output"]) == count
        assert len(rebuilt(events_of(url, **requested))) == count


OUTPUTS = [{"type": "function_call_output", "call_id": c, "output": c} for c in "xy"]


@pytest.mark.parametrize(
    ("refused", "several", "items", "turns"),
    [
        ((), True, [{"role": "developer", "content": "dev"}, USER],
         [("system", "sys"), ("system", "dev"), ("user", "a")]),
        ((), True, [USER, {"role": "developer", "content": "dev"}, USER],
         [("system", "sys"), ("user", "a"), ("system", "dev"), ("user", "a")]),
        (("system",), True, [USER, {"role": "developer", "content": "dev"}],
         [("system", "sys"), ("user", "a"), ("user", "dev")]),
        (("system", "user"), True, [USER, {"role": "developer", "content": "dev"}, USER],
         [("system", "sys"), ("user", "a\n\ndev\n\na")]),
        ((), True, [USER, *CALLS, *OUTPUTS],
         [("system", "sys"), ("user", "a"), ("assistant", "xy"), ("tool", "x"), ("tool", "y")]),
        ((), False, [USER, *CALLS, *OUTPUTS],
         [("system", "sys"), ("user", "a"), ("assistant", "x"), ("tool", "x"), ("assistant", "y"), ("tool", "y")]),
        ((), True, [USER, {"type": "web_search_call", "id": "ws"}, {"type": "reasoning", "summary": []},
                    {"role": "assistant", "content": "b"}, CALLS[0], OUTPUTS[0],
                    {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]}],
         [("system", "sys"), ("user", "a"), ("assistant", "bx"), ("tool", "x"), ("assistant", "c")]),
    ],
)  # fmt: skip
def test_items_become_turns_that_the_template_accepts(
    url: str, engine: FakeEngine, refused: Any, several: bool, items: Any, turns: Any, monkeypatch: Any
) -> None:
    """`refused`: "system": late ones; "user": also two users in a row."""
    engine.tokenizer.tool_form = ToolForm(arguments_as_text=False, null_content=False, several=several)

    def shows(*shape: str) -> str:
        late = "system" in shape[1:] and "system" in refused
        in_a_row = ("user", "user") in pairwise(shape) and "user" in refused
        return "refused" if late or in_a_row else "shown"

    monkeypatch.setattr(engine.tokenizer, "shows", shows)
    answer = post(url, instructions="sys", input=items)
    assert answer.status_code == 200, answer.text
    rendered = [
        (turn["role"], (turn["content"] or "") + "".join(call["id"] for call in turn.get("tool_calls", ())))
        for turn in engine.tokenizer.rendered[0]
    ]
    assert rendered == turns


def test_requested_fields_arrive(url: str, engine: FakeEngine) -> None:
    requested = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "max_output_tokens": 2,
        "cache_salt": "mine",
    }
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    harmless = {
        "prompt_cache_key": "k", "client_metadata": {"x": 1}, "truncation": "auto", "service_tier": "auto",
        "include": ["web_search_call.results"], "background": False, "previous_response_id": None, "unknown": 1,
        "user": "u", "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    body = post(
        url, input="a b c", text={"format": form}, reasoning={"effort": "low"}, **requested, **harmless
    ).json()
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.max_tokens, request.cache_salt) == (2, "mine")
    assert request.constraint is not None
    assert body["output"][0]["content"][0]["text"].startswith("reasoning_effort=low ")
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][-1]["status"] == "incomplete"
    assert (body["text"]["format"], body["reasoning"]["effort"], body["truncation"]) == (
        form,
        "low",
        "disabled",
    )
    assert events_of(url, input="a b c", max_output_tokens=2)[-1]["type"] == "response.incomplete"
    # A key that agents make of a conversation's number neither separates nor unlocks anything.
    post(url, input="a", prompt_cache_key="mine")
    assert engine.requests[-1].cache_salt == ""


@pytest.mark.parametrize(
    ("variables", "effort", "reported", "answered"),
    [
        ({"enable_thinking"}, "none", "enable_thinking=False", "none"),
        ({"enable_thinking"}, "high", "enable_thinking=True", "high"),
        ({"mood"}, "high", "", None),
    ],
)
def test_effort_is_what_the_template_makes_of_it(
    url: str, engine: FakeEngine, variables: Any, effort: str, reported: str, answered: str | None
) -> None:
    engine.tokenizer.template_variables = frozenset(variables)
    body = post(url, input="a", reasoning={"effort": effort}).json()
    assert body["output"][0]["content"][0]["text"] == f"{reported} a ".lstrip()
    assert body["reasoning"]["effort"] == answered


def test_a_failure_keeps_the_text_so_far(url: str, engine: FakeEngine) -> None:
    engine.says, engine.fail_after_words = ["ok <tool_call>", '{"name": "war', "never"], 2
    events = events_of(url, input="a", tools=[TOOL])
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"] == rebuilt(events)
    assert failed["output"][0]["content"][0]["text"] == 'ok <tool_call>{"name": "war'
    assert failed["output"][0]["status"] == "incomplete"
    assert post(url, input="a", tools=[TOOL]).status_code == 500


def test_large_conversations_cross_to_the_process_that_parses(url: str, engine: FakeEngine) -> None:
    output = {"type": "function_call_output", "call_id": "x", "output": "x" * 50_000}
    answer = post(url, input=[USER, CALLS[0], output], tools=[TOOL])
    assert answer.status_code == 200, answer.text
    assert engine.tokenizer.rendered[0][2]["content"] == "x" * 50_000


def test_openais_client_runs_a_conversation_with_tools(url: str, engine: FakeEngine) -> None:
    engine.says = SAYS
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=30) as client:
        history: list[Any] = [USER]
        with client.responses.stream(model=MODEL, input=history, tools=[TOOL]) as stream:  # type: ignore[list-item]
            final = stream.get_final_response()
        assert final.output_text == "Let me see."
        assert final.usage is not None
        assert final.usage.output_tokens_details.reasoning_tokens == 2
        call = final.output[-1]
        assert call.type == "function_call"
        history += [item.model_dump(exclude_none=True) for item in final.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "20"})
        engine.says = ["20 degrees"]
        answer = client.responses.create(model=MODEL, input=history, tools=[TOOL])  # type: ignore[list-item]
    assert answer.output_text == "20 degrees"
    turns, tools = engine.tokenizer.rendered
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1]["content"], turns[1]["reasoning_content"]) == ("Let me see.", "I should look.")
    assert tools[0]["function"]["name"] == "warmth"


def test_openais_async_client_streams(url: str) -> None:
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=30) as client:
            stream = await client.responses.create(model=MODEL, input="once upon", stream=True)
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            whole = await client.responses.create(model=MODEL, input="once upon")
        assert "".join(pieces) == whole.output_text
        return whole.output_text

    assert asyncio.run(run()) == "once upon "


@pytest.mark.parametrize(("draining", "stream"), [(False, True), (True, False)])
def test_openais_client_retries_when_all_places_are_taken(
    url: str, engine: FakeEngine, draining: bool, stream: bool
) -> None:
    refusals = [CapacityError("full", retry_after_s=0.01, draining=draining)]
    submit = engine.submit

    def refuse_once(request: Any) -> None:
        if refusals:
            raise refusals.pop()
        submit(request)

    engine.submit = refuse_once  # type: ignore[method-assign]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=1, timeout=30) as client:
        if stream:
            with client.responses.stream(model=MODEL, input="once") as streamed:
                assert streamed.get_final_response().output_text == "once "
        else:
            assert client.responses.create(model=MODEL, input="once").output_text == "once "
    assert refusals == []
