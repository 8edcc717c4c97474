"""Conversations as strangers send them, arranged for templates of every strictness: each is rendered, and whole."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from twofold.text.conversation.arranging import arranged, rendered
from twofold.text.conversation.calls import arguments_of
from twofold.text.conversation.content import THINKING, is_unreadable, placeholder, readable, separate
from twofold.text.conversation.repairs import REPAIRS, Repair
from twofold.text.conversation.surrogates import whole_characters
from twofold.text.tokenizer import ChatTemplate

CALLS = (
    "{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}"
    "{%- endfor %}"
)
TURN = "{{ '<' + m.role + '>' + (m.content or '') }}" + CALLS
EVERY = "{%- for m in messages %}" + TURN + "{%- endfor %}{{ '<assistant>' if add_generation_prompt }}"
HEAD = "{%- for m in messages %}{%- set last = messages[loop.index0 - 1] if loop.index0 else none %}"


def refusing(condition: str, turn: str = TURN) -> str:
    """A template that raises an error at a message for which `condition` holds."""
    return f"{HEAD}{{%- if {condition} %}}{{{{ raise_exception('no') }}}}{{%- endif %}}{turn}{{%- endfor %}}"


# Mistral's rule: user and assistant take turns, calls and results do not count.
ALTERNATING = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages %}"
    "{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{%- endif %}"
    "{%- if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('turns') }}{%- endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endif %}" + TURN + "{%- endfor %}"
)
NINE = "{{ raise_exception('id') if i is not string or i | length != 9 }}{{ i }}"
TEMPLATES = {
    "every role anywhere": EVERY,
    "roles in turns": ALTERNATING,
    "system first": refusing("m.role == 'system' and not loop.first"),
    "system first, others dropped": refusing(
        "false", "{%- if m.role != 'system' or loop.first %}" + TURN + "{%- endif %}"
    ),
    "no system": refusing("m.role == 'system'"),
    "a question": "{{ raise_exception('no') if not messages | selectattr('role', 'eq', 'user') | list }}" + EVERY,
    "results after calls": refusing("m.role == 'tool' and (not last or last.role not in ('assistant', 'tool'))"),
    "calls before results": refusing("last and last.tool_calls and m.role != 'tool'"),
    "nine letters": EVERY.replace(
        TURN, TURN + "{%- for c in m.tool_calls or [] %}{%- set i = c.id %}" + NINE + "{%- endfor %}"
        "{%- if m.role == 'tool' %}{%- set i = m.tool_call_id %}" + NINE + "{%- endif %}"
    ),
    "one call": refusing("(m.tool_calls or []) | length > 1"),
    "text arguments": EVERY.replace("(c.function.arguments | tojson)", "'' + c.function.arguments"),
    "null content": refusing("m.tool_calls and m.content is not none"),
    "no calls": refusing("m.role == 'tool'", "{{ m.role ~ m.content }}"),
    "questions and answers": refusing(
        "m.role not in ('user', 'assistant') or m.tool_calls or last.role == m.role", "{{ m.content }}"
    ),
}  # fmt: skip


class Template:
    """A template as the server's tokenizer offers it."""

    def __init__(self, source: str) -> None:
        self.compiled = ChatTemplate(source, where="here", special_tokens={})
        self.tool_form = self.compiled.tool_form

    def shows(self, *shape: Any) -> Any:
        return self.compiled.shows(shape)

    def render(self, messages: list[dict[str, Any]]) -> str:
        return self.compiled.render(messages, add_generation_prompt=True)


@pytest.fixture(scope="module")
def templates() -> dict[str, Template]:
    return {name: Template(source) for name, source in TEMPLATES.items()}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(*ids: str | None, arguments: str = '{"a": "argued"}', text: str = "") -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(call_id: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two users": [user("one"), answer("two"), user("three"), user("four")],
    "two assistants": [user("one"), answer("two"), answer("three"), user("four")],
    "late system": [system("one"), user("two"), answer("three"), system("four"), user("five")],
    "system after a question": [user("one"), system("two")],
    "two systems": [system("one"), system("two"), user("three")],
    "system after a result": [user("one"), call("x"), result("x", "two"), system("three")],
    "only a system": [system("one")],
    "only an assistant": [answer("one")],
    "assistant first": [system("zero"), answer("one"), user("two")],
    "call first": [call("x"), result("x", "two"), user("three")],
    "result first": [result("x", "one"), user("two")],
    "result without a call": [user("one"), answer("two"), result("x", "three"), user("four")],
    "call without a result": [user("one"), call("x"), user("two")],
    "call at the end": [user("one"), call("x")],
    "user after a result": [user("one"), call("x"), result("x", "two"), user("three")],
    "text, then a call": [user("one"), answer("two"), call("x"), result("x", "three"), answer("four"), user("five")],
    "two calls in a row": [user("one"), call("x"), call("y"), result("x", "two"), result("y", "three")],
    "results in another order": [user("one"), call("x", "y"), result("y", "two"), result("x", "three")],
    "a late result": [user("one"), call("x"), user("two"), result("x", "three"), user("four")],
    "ids of every kind": [
        user("one"),
        call("call_PTLP8xhu3uwZk4l3nlnrrJha", "", None, "ü-" * 400),
        result("call_PTLP8xhu3uwZk4l3nlnrrJha", "two"),
        result(None, "three"),
        result("", "four"),
        result("ü-" * 400, "five"),
    ],
    "the same id twice": [user("one"), call("x"), result("x", "two"), call("x"), result("x", "three")],
    "unknown ids": [user("one"), call("x", "y"), result("z", "two"), result("y", "three")],
    "one of two results": [user("one"), call("x", "y"), result("y", "two"), user("three")],
    "damaged arguments": [user("one"), call("x", arguments='{"a": "argu'), result("x", "two")],
    "empty contents": [system("zero"), user(""), call("x"), result("x", ""), answer(""), user("")],
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_every_conversation_is_rendered_whole(templates: dict[str, Template], name: str, kind: str) -> None:
    template, turns = templates[name], CONVERSATIONS[kind]
    given = json.dumps(turns)
    _, prompt = rendered(turns, template, template.render)
    words = re.findall(r'"content": "(\w+)"', given)
    words += ["argu"] * len(re.findall("argu(?!ments)", given))
    for word in dict.fromkeys(words):
        assert prompt.count(word) >= words.count(word), prompt
    assert json.dumps(turns) == given, "the client's messages are not changed"


USUAL = [
    system("s"), user("a"), answer("b"), user("c"), call("abcdefgh1", text="d"), result("abcdefgh1", "e"),
    call("abcdefgh2"), result("abcdefgh2", "f"), answer("g"), user("h"),
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if name not in ("no system", "no calls", "questions and answers")]
)
def test_a_usual_conversation_is_unchanged(templates: dict[str, Template], name: str) -> None:
    template = templates[name]
    form = template.tool_form
    assert form is not None
    usual = json.loads(json.dumps(USUAL))
    for turn in usual:
        for each in turn.get("tool_calls", ()):
            text = each["function"]["arguments"]
            each["function"]["arguments"] = text if form.arguments_as_text else json.loads(text)
            turn["content"] = turn["content"] or (None if form.null_content else "")
    assert arranged(USUAL, template) == usual


def test_the_same_id_becomes_the_same_one(templates: dict[str, Template]) -> None:
    template = templates["nine letters"]
    turns = CONVERSATIONS["ids of every kind"]
    once, longer = arranged(turns, template), arranged([*turns, user("more")], template)
    assert longer[: len(once)] == once
    called = [each["id"] for each in once[1]["tool_calls"]]
    assert len(set(called)) == 4
    assert [turn["tool_call_id"] for turn in once[2:]] == called
    kept = arranged([user("a"), call("9Ae3bDc2F"), result("9Ae3bDc2F", "b")], template)
    assert kept[2]["tool_call_id"] == "9Ae3bDc2F"


def test_results_follow_their_calls_where_the_template_shows_no_ids(templates: dict[str, Template]) -> None:
    turns = CONVERSATIONS["results in another order"]
    assert [turn["content"] for turn in arranged(turns, templates["every role anywhere"])] == [
        "one",
        "",
        "three",
        "two",
    ]
    assert [turn["content"] for turn in arranged(turns, templates["nine letters"])] == [
        "one",
        "",
        "two",
        "three",
    ]


def test_a_missing_result_beside_others_is_named(templates: dict[str, Template]) -> None:
    turns = arranged(CONVERSATIONS["one of two results"], templates["every role anywhere"])
    assert [turn["content"] for turn in turns] == ["one", "", "[no result]", "two", "three"]
    assert "name" not in turns[3]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('""', {}),
        ('{"a": ', {"invalid_arguments": '{"a": '}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ("7", {"invalid_arguments": "7"}),
        ("{" * 20_000, {"invalid_arguments": "{" * 20_000}),
    ],
)
def test_arguments_are_an_object(text: str, arguments: dict[str, Any]) -> None:
    assert arguments_of(text) == arguments


def test_half_a_character_is_replaced() -> None:
    text = r'{"a": "\ud83d\ude00 \uD83D \ude00\\ud83d é \u00e9 \ud83d"}'
    mended = r'{"a": "\ud83d\ude00 \ufffd \ufffd\\ud83d é \u00e9 \ufffd"}'
    assert whole_characters(text) == mended
    assert whole_characters(text.encode()) == mended.encode()
    assert arguments_of(text) == {"a": "😀 � �\\ud83d é é �"}


IMAGE = "[image: this model reads text only]"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}, {"text": "c"}], "abc"),
        ({"type": "text", "text": "a"}, "a"),
        ([{"type": "text", "text": None}], ""),
        (
            [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b", "annotations": []}],
            "ab",
        ),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], IMAGE),
        ([{"type": "image", "source": {"type": "base64", "data": "aGk="}}], IMAGE),
        ([{"type": "input_image", "image_url": "x"}], IMAGE),
        ([{"type": "input_audio", "input_audio": {"data": "aGk="}}], "[audio: this model reads text only]"),
        (
            [{"type": "file", "file": {"filename": "a[1].pdf", "file_data": "x"}}],
            "[file a 1 .pdf: this model reads text only]",
        ),
        ([{"type": "document", "source": {"type": "text", "data": "words"}}], "words"),
        ([{"type": "document", "source": {"type": "base64"}}], "[document: this model reads text only]"),
        ([{"type": "search_result", "title": "t", "content": [{"type": "text", "text": "found"}]}], "found"),
        ([{"type": "redacted_thinking", "data": "x"}], ""),
        ([{"type": "odd", "x": 1}], "[odd: this model reads text only]"),
        ({"warmth": 20}, '{"warmth": 20}'),
        (7, 7),
    ],
)
def test_content_is_text(content: Any, text: Any) -> None:
    assert readable(content) == text


def test_content_without_anything_to_read() -> None:
    assert is_unreadable(f"{IMAGE}\n{placeholder('file', 'a.pdf')}")
    assert not is_unreadable(f"what is this? {IMAGE}")
    assert not is_unreadable("")


def test_thinking_is_no_content() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "ah", "signature": "x"},
    ]
    assert separate(parts, THINKING) == ([parts[1]], [parts[0], parts[2]])
    assert [readable(part) for part in separate(parts, THINKING)[1]] == ["hm", "ah"]
    assert separate("a", THINKING) == ("a", [])


def test_every_repair_is_described() -> None:
    assert set(REPAIRS) == set(get_args(Repair))
