"""Chat templates: rendered as transformers renders them, and what happens when one refuses or runs away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.errors import RequestError
from twofold.text.tokenizer import ChatTemplate, Tokenizer

from tests.tiny_models.writing import CHATML_TEMPLATE, write_tiny_tokenizer

# What templates in the wild do: block trimming, namespaces, loop controls, tools as JSON, refusals, special tokens.
ELABORATE_TEMPLATE = """
{%- set ns = namespace(turns=0) %}
{{- bos_token }}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'note' %}
        {% continue %}
    {% endif %}
    {% if message.role not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('Unknown role: ' + message.role) }}
    {% endif %}
    {% set ns.turns = ns.turns + 1 %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {% else %}
<{{ message.role }}{{ loop.index0 }}>{{ message['content'] }}
    {% endif %}
{% endfor %}
turns={{ ns.turns }} {{ flag | default('unset') }}
{% if add_generation_prompt %}
>>
{%- endif %}
"""
# GLM's format: nothing between marks and roles, tools as JSON with unescaped letters, answers by key and value.
GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}{%- else -%}
        {%- for item in content if item is mapping and item.type == 'text' -%}{{ item.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set last.user = loop.index0 -%}{%- endfor %}
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
<|assistant|>
<think>{{ m.reasoning_content | default('') | trim if loop.index0 > last.user }}</think>
{{ text(m.content) }}
        {%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
            {%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
            {%- endfor -%}</tool_call>
        {%- endfor -%}
    {%- else -%}
<|{{ m.role }}|>
{{ text(m.content) }}{{ '/nothink' if enable_thinking is defined and not enable_thinking and m.role == 'user' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif -%}"""
TOOLS = [{"type": "function", "function": {"name": "naïve <b>", "parameters": {"z": 1, "a": [1, 2]}}}]
CONVERSATION = [
    {"role": "system", "content": "Be brief. <&>"},
    {"role": "note", "content": "left out"},
    {"role": "user", "content": "Grüße 🐉\n\nthe end"},
    {"role": "assistant", "content": "  trimmed  "},
    {"role": "user", "content": ""},
]


def pair(directory: Path, template: str) -> tuple[Tokenizer, Any]:
    write_tiny_tokenizer(directory, chat_template=template)
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    return Tokenizer.load(directory), reference


@pytest.mark.parametrize(
    "template", [CHATML_TEMPLATE, ELABORATE_TEMPLATE, GLM_TEMPLATE], ids=["chatml", "elaborate", "glm"]
)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_renders_as_transformers_does(tmp_path: Path, template: str, prompt: bool, tools: Any) -> None:
    tokenizer, reference = pair(tmp_path, template)
    for variables in ({}, {"flag": "set"}, {"enable_thinking": False}):
        expected = reference.apply_chat_template(
            CONVERSATION, tools=tools, add_generation_prompt=prompt, tokenize=False, **variables
        )
        ours = tokenizer.apply_chat_template(CONVERSATION, prompt, tools=tools, **variables)
        assert ours == expected
        assert ours


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, ELABORATE_TEMPLATE], ids=["chatml", "elaborate"])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_continued_message_ends_the_prompt_as_with_transformers(
    tmp_path: Path, template: str, role: str
) -> None:
    tokenizer, reference = pair(tmp_path, template)
    # The same words stand in an earlier message too.
    conversation = [{"role": "user", "content": "once upon"}, {"role": role, "content": "once upon"}]
    ours = tokenizer.apply_chat_template(conversation, False, continue_final_message=True)
    assert ours == reference.apply_chat_template(conversation, tokenize=False, continue_final_message=True)
    assert ours.endswith("once upon")
    spaced = tokenizer.apply_chat_template(
        [{"role": role, "content": "once upon a "}], False, continue_final_message=True
    )
    assert spaced.endswith("once upon a "), "what the answer goes on with is what was sent"


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", where="test", special_tokens={})
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RequestError, match="does not show the last message") as caught:
        template.render(turns, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_the_variables_a_template_reads() -> None:
    source = "{% set a = 1 %}{% if enable_thinking %}{{ a }}{% endif %}{{ messages }}{{ strftime_now('%Y') }}"
    template = ChatTemplate(source, where="test", special_tokens={})
    assert "enable_thinking" in template.variables
    assert "a" not in template.variables


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    return pair(tmp_path_factory.mktemp("chatml"), CHATML_TEMPLATE)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(contents=st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_any_content_renders_and_tokenises_as_with_transformers(
    chatml: tuple[Tokenizer, Any], contents: list[str]
) -> None:
    tokenizer, reference = chatml
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    ours = tokenizer.apply_chat_template(messages)
    assert ours == reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(ours) == expected


def test_a_template_file_beats_the_settings(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="from settings")
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "from settings"
    (tmp_path / "chat_template.jinja").write_text("from file\n")
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "from file"


def test_named_templates(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    file.write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=TOOLS) == "tools"


def test_strftime_now_gives_this_year() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", where="t", special_tokens={})
    assert 2025 < int(template.render([], add_generation_prompt=False)) < 2200


def test_messages_win_over_variables_of_that_name() -> None:
    template = ChatTemplate("{{ messages | length }}", where="t", special_tokens={})
    assert template.render([{}], add_generation_prompt=False, variables={"messages": [1, 2, 3]}) == "1"


@pytest.mark.parametrize(
    ("template", "fragment"),
    [
        (ELABORATE_TEMPLATE, "Unknown role: wizard"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
        ("{% include 'other' %}", "chat template refused"),
        ("{% for i in range(10**9) %}x{% endfor %}", "chat template refused"),
    ],
)
def test_a_template_that_fails_is_a_bad_request(template: str, fragment: str) -> None:
    compiled = ChatTemplate(template, where="t", special_tokens={"bos_token": "<s>"})
    with pytest.raises(RequestError) as caught:
        compiled.render([{"role": "wizard", "content": "x"}], add_generation_prompt=True)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages"


def test_output_is_bounded() -> None:
    template = "{% for i in messages %}xxxxxxxxxx{% endfor %}"
    compiled = ChatTemplate(template, where="t", special_tokens={}, max_rendered_chars=5000)
    assert len(compiled.render([{}] * 500, add_generation_prompt=False)) == 5000
    with pytest.raises(RequestError, match="exceeds 5000 characters"):
        compiled.render([{}] * 501, add_generation_prompt=False)
