"""The table of request fields, walked: what it calls done is there, refused is refused by name, harmless passes."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import openai.types
import openai.types.chat
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.fields import ENDPOINTS, FIELDS, Endpoint, RequestField, table_of
from twofold.server.openai.schemas import ChatRequest

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a b"}]},
    "completions": {"prompt": "a b"},
}
SCHEMAS = {"chat": ChatRequest, "completions": CompletionRequest}
OPENAI = {
    "chat": openai.types.chat.completion_create_params,
    "completions": openai.types.completion_create_params,
}
VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words best_of cache_salt frequency_penalty guided_choice
    guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors logprobs max_tokens min_p
    min_tokens model n presence_penalty priority prompt_logprobs repetition_penalty request_id response_format
    return_token_ids return_tokens_as_token_ids seed skip_special_tokens spaces_between_special_tokens stop
    stop_token_ids stream stream_options structural_tag structured_outputs temperature top_k top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs echo repetition_detection
    ec_transfer_params logprob_token_ids mm_payload return_mm_kwargs return_token_offsets return_weight_versions
    routed_experts_prompt_start session_id stream_interval watermarking
"""
VLLM: dict[str, str] = {
    "chat": VLLM_BOTH
    + """add_generation_prompt chat_template chat_template_kwargs continue_final_message documents include_reasoning
    max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
    return_prompt_text thinking_token_budget tool_choice tools top_logprobs""",
    "completions": VLLM_BOTH + "prompt prompt_embeds suffix",
}


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def fields(state: str) -> list[Any]:
    return [
        pytest.param(field, id=f"{field.endpoint}-{field.name}") for field in FIELDS if field.state == state
    ]


@pytest.fixture(scope="module")
def fields_url() -> Iterator[str]:
    engine = FakeEngine(max_running=1000)
    with serving(create_app(engine, ServerConfig())) as base:
        yield base
    engine.close()


def post(url: str, field: RequestField, value: Any):
    return HTTP.post(url + PATHS[field.endpoint], json=BODIES[field.endpoint] | {field.name: value})


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_table_lists_every_field_of_openai_and_vllm(endpoint: Endpoint):
    table = table_of(endpoint)
    params = OPENAI[endpoint]
    known = set()
    for body in (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming):
        known |= set(typing.get_type_hints(body))
    assert len(known) >= 18
    assert known - table.keys() == set()
    assert set(VLLM[endpoint].split()) - table.keys() == set()
    assert len(table) == sum(field.endpoint == endpoint for field in FIELDS), "a field stands there twice"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_schema_has_what_the_table_calls_done_and_no_more(endpoint: Endpoint):
    table = table_of(endpoint)
    done = {name for name, field in table.items() if field.state == "done"}
    refused = {name for name, field in table.items() if field.state == "refused"}
    assert set(SCHEMAS[endpoint].model_fields) == done | refused
    assert set(SCHEMAS[endpoint].model_json_schema()["properties"]) == done, (
        "/openapi.json offers what is done"
    )


@pytest.mark.parametrize("field", fields("refused"))
def test_a_refused_field_is_400_unless_it_asks_for_nothing(fields_url: str, field: RequestField):
    response = post(fields_url, field, field.example)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field.name
    assert field.note in response.json()["error"]["message"]
    for value in (None, *field.harmless):
        assert post(fields_url, field, value).status_code == 200, value


@pytest.mark.parametrize("field", fields("harmless"))
def test_a_harmless_field_is_accepted_with_any_value(fields_url: str, field: RequestField):
    for value in ("x", 7, True, {"a": [1]}):
        assert post(fields_url, field, value).status_code == 200, value


@pytest.mark.parametrize("field", fields("done"))
def test_a_field_that_is_done_may_be_null(fields_url: str, field: RequestField):
    if field.name not in BODIES[field.endpoint]:
        assert post(fields_url, field, None).status_code == 200


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": 7}, "messages[0].content"),
    ],
)
def test_a_turn_that_cannot_be_read_is_refused_by_name(fields_url: str, turn: dict, param: str):
    messages = [turn, {"role": "user", "content": "a"}]
    response = HTTP.post(fields_url + PATHS["chat"], json={"messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("endpoint", "more", "param"),
    [
        ("chat", {"tools": [TOOL]}, "tools"),
        ("chat", {"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ("chat", {"tools": [TOOL], "tool_choice": "none"}, None),
        ("chat", {"tools": [], "tool_choice": "auto"}, None),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0]"),
        ("chat", {"tools": [{"type": "web_search"}]}, "tools[0]"),
        ("chat", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all"}}}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}}, "tool_choice"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ("chat", {"tools": [TOOL | {"function": {"name": "f", "parameters": []}}]}, "tools[0]"),
        ("chat", {"tools": [TOOL] * 513, "tool_choice": "none"}, "tools"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": "some"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("chat", {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ("chat", {"chat_template_kwargs": {"a": "b" * 20_000}}, "chat_template_kwargs"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 129}, "n"),
        ("chat", {"n": True}, "n"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("chat", {"logit_bias": {"-5": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"five": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ("chat", {"bad_words": [5]}, "bad_words[0]"),
        ("chat", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ("chat", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("completions", {"min_tokens": 17}, "min_tokens"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"n": 3, "best_of": 2}, "best_of"),
        ("completions", {"best_of": 2, "stream": True}, "best_of"),
        ("completions", {"prompt": ["a"] * 65, "n": 2}, "n"),
        ("completions", {"prompt": ["a"] * 129}, "prompt"),
        ("completions", {"prompt": ["a", ""]}, "prompt[1]"),
        ("completions", {"prompt": [[1], []]}, "prompt[1]"),
        ("completions", {"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ("completions", {"prompt": ["a", [1]]}, "prompt[1]"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_bounds_and_fields_that_must_agree(fields_url: str, endpoint: str, more: dict, param: str | None):
    response = HTTP.post(fields_url + PATHS[endpoint], json=BODIES[endpoint] | more)
    assert response.status_code == (400 if param else 200), response.text
    if param:
        # The key of a wrong bias is named too.
        assert response.json()["error"]["param"].removesuffix(".five") == param


def test_a_large_body_is_refused_as_a_small_one(fields_url: str):
    body = BODIES["chat"] | {"top_logprobs": 2, "unknown": "x" * 100_000}
    response = HTTP.post(fields_url + PATHS["chat"], json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(("max_tokens", "room"), [(3, 3), (1, 1), (100_000, 1)])
def test_minus_one_truncates_to_what_the_context_holds_beside_the_answer(
    fields_url: str, endpoint: str, max_tokens: int, room: int
):
    text = "a " * 30_000
    prompt = (
        {"prompt": text} if endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
    )
    body = prompt | {"truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    response = HTTP.post(fields_url + PATHS[endpoint], json=body)
    assert response.status_code == 200, response.text
    max_context = HTTP.get(f"{fields_url}/v1/models").json()["data"][0]["max_model_len"]
    assert response.json()["usage"]["prompt_tokens"] == max_context - room


@pytest.mark.parametrize("prompt", [[1] * 100, [[1] * 100, [2] * 100], "a " * 100])
def test_a_prompt_that_is_cut_may_be_longer_than_the_context(fields_url: str, prompt: Any):
    body = {"prompt": prompt, "truncate_prompt_tokens": 5}
    response = HTTP.post(fields_url + PATHS["completions"], json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] in (5, 10)
    del body["truncate_prompt_tokens"]
    response = HTTP.post(fields_url + PATHS["completions"], json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"
