"""Responses kept in memory: continued by their id, referred to by items' ids, read and deleted; and counted input."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from openai.types.responses import Response
from responses_play import TOOL, USER, events_of, post
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.server.responses.store import ResponseStore

MODEL = "fake-tales"
CALL = ['<tool_call>{"name": "warmth", "arguments": ', '{"city": "Brig"}}</tool_call>']
OUTPUT = {"type": "function_call_output", "output": "20"}


def shown(engine: FakeEngine) -> list[tuple[str, Any]]:
    """Roles and texts of the last conversation."""
    return [(turn["role"], turn.get("content")) for turn in engine.tokenizer.rendered[0]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_step_continues_a_call_by_its_response_or_by_its_items(
    engine: FakeEngine, stream: bool
) -> None:
    """As the AI SDK's provider for OpenAI does: it refers to the items that the first step returned."""
    engine.max_context = 4096
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as url:
        engine.says = CALL
        if stream:
            first = events_of(url, input=[USER], tools=[TOOL])[-1]["response"]
        else:
            first = post(url, input=[USER], tools=[TOOL]).json()
        (call,) = first["output"]
        engine.says = ["It is 20."]
        result = OUTPUT | {"call_id": call["call_id"]}
        reference = {"type": "item_reference", "id": call["id"]}
        for body in (
            {"previous_response_id": first["id"], "input": [result]},
            {"input": [USER, reference, result]},
            {"input": [USER, {"id": call["id"]}, result]},
        ):
            second = post(url, tools=[TOOL], **body)
            assert second.status_code == 200, second.text
            Response.model_validate(second.json())
            assert second.json()["previous_response_id"] == body.get("previous_response_id")
            assert [role for role, _ in shown(engine)] == ["user", "assistant", "tool"]
            turns = engine.tokenizer.rendered[0]
            assert turns[1]["tool_calls"][0]["function"] == {"name": "warmth", "arguments": {"city": "Brig"}}
        third = post(url, previous_response_id=second.json()["id"], input="And now?")
        assert third.status_code == 200, third.text
        assert [role for role, _ in shown(engine)] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_response_is_read_and_deleted_by_openais_client(engine: FakeEngine) -> None:
    with (
        serving(create_app(engine, ServerConfig())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=30) as client,
    ):
        made = client.responses.create(model=MODEL, input="once upon", instructions="be brief")
        assert made.store is True
        assert client.responses.retrieve(made.id).output_text == made.output_text
        (item,) = client.responses.input_items.list(made.id).data
        assert item.to_dict() == {"role": "user", "content": "once upon"}
        count = client.responses.input_tokens.count(model=MODEL, input="once upon", instructions="be brief")
        assert count.input_tokens == made.usage.input_tokens > 0
        cancelled = HTTP.post(f"{url}/v1/responses/{made.id}/cancel")
        assert (cancelled.status_code, "background" in cancelled.text) == (400, True)
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        unkept = client.responses.create(model=MODEL, input="once upon", store=False)
        assert unkept.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="a", previous_response_id=unkept.id)


def test_a_server_may_keep_none(engine: FakeEngine) -> None:
    with serving(create_app(engine, ServerConfig(max_stored_responses=0))) as url:
        made = post(url, input="a").json()
        assert made["store"] is False
        assert HTTP.get(f"{url}/v1/responses/{made['id']}").status_code == 404


def response(number: int, size: int = 1) -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": "x" * size}]}


def test_the_least_recently_used_responses_make_room() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(3):
        store.put(response(number), [{"role": "user"}], f"resp_{number - 1}" if number else None)
    assert [item.get("id") for item in store.conversation("resp_2") or ()] == [
        None, "msg_0", None, "msg_1", None, "msg_2",
    ]  # fmt: skip
    store.put(response(3), [], None)
    assert store.get("resp_2") is None
    assert store.item("msg_2") is None
    assert store.item("msg_1") == response(1)["output"][0]
    store.put(response(4, 9_900), [], None)
    assert [store.get(f"resp_{number}") is not None for number in range(5)] == [False] * 4 + [True]
    store.put(response(5, 20_000), [], None)
    assert store.get("resp_5") is None
    assert store.get("resp_4") is not None


def test_a_conversation_with_a_missing_turn_is_not_continued() -> None:
    store = ResponseStore(max_responses=9, max_bytes=10_000)
    store.put(response(0), [], None)
    store.put(response(1), [], "resp_0")
    assert store.remove("resp_0")
    assert not store.remove("resp_0")
    assert store.conversation("resp_1") is None
    assert store.item("msg_0") is None
    looped = response(2)
    store.put(looped, [], "resp_2")
    assert store.conversation("resp_2") is None
