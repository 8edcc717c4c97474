"""Tools and thinking over /v1/chat/completions: what a client sees whole and in streams, and what the template gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.app import create_app
from twofold.text.tokenizer import ToolForm

QUESTION: list[Any] = [{"role": "user", "content": "How warm is it?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "warmth", "description": "°C", "parameters": {"type": "object"}},
}
SAYS = [
    "<thi", "nk>\nI should", " look.\n</think>\n\nLet", " me see.\n<tool", "_call>\n{\"name\": \"war",
    "mth\", \"arguments\": {\"city\": \"Bri", "g\"}}\n</tool_call>\n<tool_call>{\"name\": \"cold\", ",
    "\"arguments\": {}}</tool_call>",
]  # fmt: skip


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    engine.max_context = 4096
    engine.says = SAYS
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    with serving(create_app(engine, config)) as base:
        yield base


def whole_and_stream(url: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """(choice, the same put together from a stream, the stream's deltas)."""
    body = {"messages": QUESTION, "tools": [TOOL]} | more
    whole = HTTP.post(f"{url}/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    text = HTTP.post(f"{url}/v1/chat/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert "reasoning_content" not in delta
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return whole.json()["choices"][0], message | {"finish_reason": choices[-1]["finish_reason"]}, choices


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(call["name"], call["arguments"]) for call in calls]


BOTH = [("warmth", '{"city": "Brig"}'), ("cold", "{}")]


@pytest.mark.parametrize(
    ("more", "content", "thinking", "calls"),
    [
        ({}, "Let me see.", "I should look.", BOTH),
        ({"parallel_tool_calls": False}, "Let me see.", "I should look.", BOTH[:1]),
        ({"include_reasoning": False}, "Let me see.", "", BOTH),
        ({"separate_reasoning": False}, "<think>\nI should look.\n</think>\n\nLet me see.", "", BOTH),
        ({"tool_choice": "none"}, "".join(SAYS).partition("</think>\n\n")[2], "I should look.", []),
        ({"tools": []}, "".join(SAYS).partition("</think>\n\n")[2], "I should look.", []),
    ],
)
def test_an_answer_is_the_same_whole_and_in_a_stream(
    url: str, more: dict[str, Any], content: str, thinking: str, calls: list[tuple[str, str]]
) -> None:
    choice, streamed, chunks = whole_and_stream(url, **more)
    message = choice["message"]
    assert (message["content"], functions(message)) == (content, calls)
    assert not any("reasoning_content" in chunk["delta"] for chunk in chunks)  # some clients would show both
    assert (message.get("reasoning") or "") == (message.get("reasoning_content") or "") == thinking
    assert (streamed["content"], streamed["reasoning"], functions(streamed)) == (
        content,
        thinking,
        calls,
    )
    assert choice["finish_reason"] == streamed["finish_reason"] == ("tool_calls" if calls else "stop")
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)


def test_arguments_are_streamed_and_tokens_stay_with_their_chunks(url: str) -> None:
    _, _, choices = whole_and_stream(url, logprobs=True, return_token_ids=True)
    pieces = [
        call["function"]["arguments"]
        for c in choices
        for call in c["delta"].get("tool_calls", ())
        if "id" not in call
    ]
    assert pieces == ['{"city": "Bri', 'g"}', "{}"]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == list(
        range(1, len(SAYS) + 1)
    )


COLD: dict[str, Any] = {"type": "function", "function": {"name": "cold"}}


@pytest.mark.parametrize(("mode", "held"), [("auto", False), ("required", True)])
def test_the_prompt_lists_allowed_tools_only(engine: FakeEngine, url: str, mode: str, held: bool) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "cold"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": QUESTION, "tools": [TOOL, COLD], "tool_choice": choice}
    response = HTTP.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert engine.tokenizer.rendered[1] == [COLD]
    constraint = engine.requests[-1].constraint
    assert (constraint is not None) == held
    assert constraint is None or "warmth" not in constraint.constraint.constraint.text


def test_a_function_may_be_named_as_the_responses_api_names_it(engine: FakeEngine, url: str) -> None:
    flat = {"type": "function", "name": "cold"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [flat]}
    for choice in (flat, allowed):
        body = {"messages": QUESTION, "tools": [TOOL, COLD], "tool_choice": choice}
        response = HTTP.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        constraint = engine.requests[-1].constraint
        assert constraint is not None
        assert "warmth" not in constraint.constraint.constraint.text
    unnamed = body | {"tool_choice": {"type": "function", "function": "cold", "name": "cold"}}
    assert HTTP.post(f"{url}/v1/chat/completions", json=unnamed).status_code == 400


CUSTOM: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "warmth",
        "description": "°C",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}},
    },
}


def test_a_custom_tool_is_called_with_a_text(engine: FakeEngine, url: str) -> None:
    engine.says = [
        '<tool_call>{"name": "warmth", "arguments": {"inp', 'ut": "in \\"Brig\\""}}</tool_call>',
        '<tool_call>{"name": "cold", "arguments": {}}</tool_call>',
    ]  # fmt: skip
    body = {"messages": QUESTION, "tools": [CUSTOM, COLD]}
    message = HTTP.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    custom, function = message["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "warmth", "input": 'in "Brig"'})
    assert function["function"] == {"name": "cold", "arguments": "{}"}
    reported = engine.tokenizer.rendered[1][0]["function"]
    assert reported["parameters"]["required"] == ["input"]
    assert 'start: "x"' in reported["description"]

    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        chunks = client.chat.completions.create(model="fake-tales", stream=True, **body)
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.type for call in deltas if call.id] == ["custom", "function"]
    reply = [call.model_extra["custom"] for call in deltas if call.index == 0]
    assert reply == [{"name": "warmth", "input": ""}, {"input": 'in "Brig"'}]

    # What was answered goes back as it came.
    result = {"role": "tool", "tool_call_id": custom["id"], "content": "20"}
    turns = [*QUESTION, {"role": "assistant", "tool_calls": [custom]}, result]
    again = HTTP.post(f"{url}/v1/chat/completions", json=body | {"messages": turns})
    assert again.status_code == 200, again.text
    call = engine.tokenizer.rendered[0][1]["tool_calls"][0]["function"]
    assert call == {"name": "warmth", "arguments": {"input": 'in "Brig"'}}

    choice = {"type": "custom", "custom": {"name": "warmth"}}
    forced = HTTP.post(f"{url}/v1/chat/completions", json=body | {"tool_choice": choice})
    assert forced.status_code == 200, forced.text
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert "warmth" in constraint.constraint.constraint.text


def test_ollamas_clients_get_calls_of_custom_tools_as_functions(engine: FakeEngine, url: str) -> None:
    engine.says = ['<tool_call>{"name": "warmth", "arguments": {"input": "Brig"}}</tool_call>']
    for stream in (False, True):
        body = {"model": "fake-tales", "messages": QUESTION, "tools": [CUSTOM], "stream": stream}
        text = HTTP.post(f"{url}/api/chat", json=body).text
        lines = [json.loads(line)["message"] for line in text.splitlines()]
        (call,) = [call for message in lines for call in message.get("tool_calls", ())]
        assert call["function"] == {"name": "warmth", "arguments": {"input": "Brig"}}


@pytest.mark.parametrize("shown", [True, False])
def test_a_role_of_the_templates_own_is_given_to_it(engine: FakeEngine, url: str, shown: bool) -> None:
    render = engine.tokenizer.apply_chat_template

    def without_critics(messages: list[dict[str, Any]], *arguments: Any, **options: Any) -> str:
        engine.tokenizer.rendered = list(messages), None
        kept = [message for message in messages if shown or message["role"] != "critic"]
        return render(kept, *arguments, **options)

    engine.tokenizer.apply_chat_template = without_critics  # type: ignore[method-assign]
    turns = [*QUESTION, {"role": "critic", "content": " Too long. "}, *QUESTION]
    response = HTTP.post(f"{url}/v1/chat/completions", json={"messages": turns})
    assert response.status_code == (200 if shown else 400), response.text
    if shown:
        assert engine.tokenizer.rendered[0][1] == {"role": "critic", "content": " Too long. "}
    else:
        assert response.json()["error"]["param"] == "messages[1].role"


def test_a_call_that_is_cut_off_is_text(engine: FakeEngine, url: str) -> None:
    engine.says = ["ok ", '<tool_call>{"name": "warmth", "arguments": {"ci', 'ty": ']
    choice, streamed, _ = whole_and_stream(url)
    assert choice["message"]["content"] == streamed["content"] == "".join(engine.says)
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_held_text_is_sent_before_a_failure(engine: FakeEngine, url: str) -> None:
    engine.says, engine.fail_after_words = ["ok <tool_call>", '{"name": "war', "never"], 2
    body = {"messages": QUESTION, "tools": [TOOL], "stream": True}
    text = HTTP.post(f"{url}/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    reply = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
    assert reply == 'ok <tool_call>{"name": "war'
    assert events[-1]["error"]["code"] == "engine_error"


def test_openais_client_runs_a_conversation_with_tools(engine: FakeEngine, url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=30) as client:
        model = client.models.list().data[0].id
        messages = list(QUESTION)
        with client.chat.completions.stream(model=model, messages=messages, tools=[TOOL]) as stream:
            answer = stream.get_final_completion().choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        messages.append(answer.message.to_dict())
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "20"} for call in answer.message.tool_calls
        ]
        client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
    rendered, tools = engine.tokenizer.rendered
    assert list(tools) == [TOOL]
    assert [turn["role"] for turn in rendered] == ["user", "assistant", "tool", "tool"]
    assert rendered[1]["tool_calls"][0]["function"] == {"name": "warmth", "arguments": {"city": "Brig"}}
    assert rendered[2]["tool_call_id"] == rendered[1]["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("form", "content", "arguments"),
    [
        (ToolForm(False, False, True), "", {"a": 1}),
        (ToolForm(True, True, True), None, '{"a": 1}'),
        (ToolForm(False, False, False), "", {"a": 1}),
        (None, 'Call of f: {"a": 1}', None),
    ],
)
def test_the_template_gets_calls_in_its_own_form(
    engine: FakeEngine, url: str, form: ToolForm | None, content: Any, arguments: Any
) -> None:
    engine.tokenizer.tool_form = form
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    response = HTTP.post(f"{url}/v1/chat/completions", json={"messages": [turn, *QUESTION]})
    assert response.status_code == 200, response.text
    given = engine.tokenizer.rendered[0][0]
    assert (given["content"], given["reasoning_content"], given["reasoning"]) == (content, "hm", "hm")
    functions = [each["function"] for each in given.get("tool_calls", ())]
    assert functions == ([] if arguments is None else [{"name": "f", "arguments": arguments}])


def test_large_calls_cross_to_the_process_that_parses(engine: FakeEngine, url: str) -> None:
    text = "x" * 50_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}, *QUESTION], "tools": [TOOL]}
    response = HTTP.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert engine.tokenizer.rendered[0][0]["tool_calls"][0]["function"]["arguments"] == {"a": text}


def test_a_model_without_known_marks_takes_no_tools(engine: FakeEngine) -> None:
    engine.max_context = 4096
    with serving(create_app(engine, ServerConfig())) as base:
        response = HTTP.post(f"{base}/v1/chat/completions", json={"messages": QUESTION, "tools": [TOOL]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in response.json()["error"]["message"]
    with pytest.raises(ConfigError, match="hermes"):
        create_app(engine, ServerConfig(tool_call_parser="unknown"))
