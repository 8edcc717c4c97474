"""LiteLLM's client against a real socket, by its OpenAI and its Anthropic provider.

It pins an older client of OpenAI's than the other tests use, so it lives in an environment of its own:
TWOFOLD_LITELLM_PYTHON names the interpreter of one with the extra `litellm`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_engine import FakeEngine
from live_server import serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

PYTHON = os.environ.get("TWOFOLD_LITELLM_PYTHON", sys.executable)
SCRIPT = """
import json, sys
import litellm
url, tool, messages = sys.argv[1], json.loads(sys.argv[2]), [{"role": "user", "content": "How warm is it?"}]
litellm.num_retries = 0
for model, base in (("openai/fake-tales", url + "/v1"), ("anthropic/fake-tales", url)):
    asked = dict(model=model, api_base=base, api_key="sesame", max_tokens=64, timeout=30)
    whole = litellm.completion(messages=messages, tools=[tool], **asked)
    with_usage = dict(stream=True, stream_options={"include_usage": True})
    chunks = list(litellm.completion(messages=messages, tools=[tool], **with_usage, **asked))
    built = litellm.stream_chunk_builder(chunks, messages=messages)
    for answer in (whole, built):
        message = answer.choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        print(json.dumps([model, message.content, calls, answer.choices[0].finish_reason, answer.usage.prompt_tokens]))
    call = whole.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "20"}
    litellm.completion(messages=[*messages, whole.choices[0].message, result], tools=[tool], **asked)
    try:
        litellm.completion(messages=messages, **asked | {"model": model + "-2"})
    except litellm.NotFoundError as error:
        print(json.dumps([model, "not found"]))
"""
TOOL = {
    "type": "function",
    "function": {"name": "warmth", "description": "°C", "parameters": {"type": "object"}},
}
SAYS = ["Let me see.", '<tool_call>{"name": "warmth", "arg', 'uments": {"city": "Brig"}}</tool_call>']


@pytest.mark.slow
def test_litellm_calls_tools_by_both_of_its_providers(engine: FakeEngine) -> None:
    if subprocess.run([PYTHON, "-c", "import litellm"], capture_output=True).returncode != 0:
        pytest.skip("LiteLLM is not installed; TWOFOLD_LITELLM_PYTHON names an interpreter that has it")
    engine.max_context, engine.says = 4096, SAYS
    config = ServerConfig(tool_call_parser="hermes", api_key=("sesame",))
    turns = []
    with serving(create_app(engine, config)) as url:
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
        ran = subprocess.run(
            [PYTHON, "-c", SCRIPT, url, json.dumps(TOOL)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        turns = engine.tokenizer.rendered[0]
    assert ran.returncode == 0, ran.stderr[-4000:]
    reply = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    for model in ("openai/fake-tales", "anthropic/fake-tales"):
        answer = [model, "Let me see.", [["warmth", {"city": "Brig"}]], "tool_calls", 4]
        assert [one for one in reply if one[0] == model] == [answer, answer, [model, "not found"]]
    assert len(engine.requests) == 6
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert turns[2]["tool_call_id"] == turns[1]["tool_calls"][0]["id"]
