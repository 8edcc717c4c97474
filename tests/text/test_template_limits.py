"""Hostile chat templates end within their limits of steps and sizes; ordinary ones render as plain Jinja does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jinja2.sandbox
import pytest
from twofold.api.errors import ModelLoadError, RequestError, TemplateLimitExceededError
from twofold.text.conversation.arranging import rendered
from twofold.text.tokenizer import ChatTemplate, Tokenizer
from twofold.text.tokenizer.template_budget import Budget, TemplateLimitError, steps_of
from twofold.text.tokenizer.template_growth import check_numbers

from tests.tiny_models.writing import CHATML_TEMPLATE, write_tiny_tokenizer

STEPS: Final = "it takes more than"
SIZE: Final = "it makes a value of more than 16777216 characters or elements"
ELEMENTS: Final = "it uses a value of more than 262144 elements at once"
LEVELS: Final = "it uses a value nested deeper than 256 levels"
BITS: Final = "it computes with a number of more than 16384 bits"
SPACE: Final = "{% set ns = namespace(a='x' * 1000, b=[2], l=[1], t=(1,)) %}"
ONE: Final = [{"role": "user", "content": "x"}]


def repeated(body: str, times: int = 99999) -> str:
    return f"{SPACE}{{% for i in range({times}) %}}{body}{{% endfor %}}"


DOUBLED: Final = repeated("{% set ns.l = [ns.l, ns.l] %}{% set ns.b = [ns.b, ns.b] %}", 40)
DEEP: Final = repeated("{% set ns.t = (ns.t,) %}", 300)
HOSTILE: dict[str, str] = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": STEPS,
    "{% for a in range(99999) if range(9999) | list | length == 3 %}{% endfor %}": STEPS,
    "{% for a in range(999) recursive %}{% if loop.depth < 3 %}{{ loop(range(9999)) }}{% endif %}{% endfor %}": STEPS,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": STEPS,
    "{% set x %}{% for i in range(99999) %}" + 9999 * "y" + "{% endfor %}{% endset %}": STEPS,
    "{{ 'x' * 10**9 }}": SIZE,
    "{{ 10**9 * 'x' }}": SIZE,
    "{{ [0] * 10**9 }}": SIZE,
    "{{ 'x' | center(1000000000) }}": SIZE,
    "{{ 'x'.center(10**9) }}": SIZE,
    "{{ 'x'.zfill(10**9) }}": SIZE,
    "{% for i in range(1) %}{{ 'x'.ljust(10**9) }}{% endfor %}": SIZE,
    "{% filter center(1000000000) %}x{% endfilter %}": SIZE,
    "{{ ('\\t' * 1000).expandtabs(10**6) }}": SIZE,
    "{{ '%1000000000d' % 1 }}": SIZE,
    "{{ '%.1000000000f' % 1 }}": SIZE,
    "{{ '%*d' % (10**9, 1) }}": SIZE,
    "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}": SIZE,
    "{{ '%1000000000d' | format(1) }}": SIZE,
    "{{ '{:1000000000}'.format(1) }}": SIZE,
    "{{ '{:{w}}'.format(1, w=1000000000) }}": SIZE,
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}": SIZE,
    "{{ ('{:1000000}' | safe).format(1) * 20 }}": SIZE,
    "{{ ('{0:9999999}' * 9).format(1) }}": SIZE,
    "{{ range(999) | join('x' * 100000) }}": SIZE,
    "{{ ('x' * 100000).join(range(999) | map('string')) }}": SIZE,
    "{{ ('x' * 1000000) | replace('x', 'y' * 1000) }}": SIZE,
    "{{ ('x' * 1000000).replace('', 'y' * 1000) }}": SIZE,
    "{{ ('\\n' * 1000) | indent(1000000) }}": SIZE,
    "{{ [[1]] | tojson(indent=100000000) }}": SIZE,
    "{% set x = [1] | slice(1000000000) | list %}": SIZE,
    "{% set x = [1] | batch(1000000000, 1) | list %}": SIZE,
    "{{ 1.5 | round(1000000000, 'ceil') }}": SIZE,
    repeated("{% set ns.a = ns.a ~ ns.a %}"): STEPS,
    repeated("{% set ns.a = ns.a + ns.a %}"): STEPS,
    repeated("{% set ns.l = ns.l + ns.l %}"): STEPS,
    repeated("{% set ns.a = ns.a[:] %}"): STEPS,
    repeated("{% if 'b' in ns.a %}{% endif %}").replace("1000", "9999999"): STEPS,
    DOUBLED + "{{ ns.l }}": ELEMENTS,
    DOUBLED + "{{ ns }}": ELEMENTS,
    DOUBLED + "{{ ns.l | tojson }}": ELEMENTS,
    DOUBLED + "{{ ns.l ~ '' }}": ELEMENTS,
    DOUBLED + "{{ ns.l == ns.b }}": ELEMENTS,
    DOUBLED + "{{ ns.l is eq ns.b }}": ELEMENTS,
    DOUBLED + "{{ ns.l in [ns.b] }}": ELEMENTS,
    DOUBLED + "{{ [ns.l].index(ns.b) }}": ELEMENTS,
    DOUBLED + "{{ '%s' % ns.l }}": ELEMENTS,
    DOUBLED + "{{ '{}'.format(ns.l) }}": ELEMENTS,
    DEEP + "{{ {ns.t: 1} }}": LEVELS,
    DEEP + "{{ ns.t in {} }}": LEVELS,
    DEEP + "{{ {}.get(ns.t) }}": LEVELS,
    DEEP + "{{ {}[ns.t] }}": "tuples are no keys",
    "{{ 10**99999999 }}": BITS,
    "{{ ('f' * 4000000) | int(0, 16) // 3 }}": BITS,
    "{{ ('f' * 4000000) | int(0, 16) is divisibleby 3 }}": BITS,
    "{{ ('a' * 8000000).rfind('b' ~ 'a' * 4000000) }}": STEPS,
    "{{ ('a' * 8000000).strip('b' * 8000000 ~ 'a') }}": STEPS,
    "{{ ('a b ' * 3000000) | title }}": STEPS,
    "{{ ('a b ' * 4000000).split() }}": STEPS,
    "{{ ([[1] * 1000] * 100) | sum(start=[]) }}": "adds only numbers",
    "{{ '<!---->' | striptags }}": "'striptags' is not available",
    "{{ 'a'.encode('punycode') }}": "'encode' is not available",
    "{{ strftime_now('%Y' * 1000) }}": "at most 200 characters",
    "{{ lipsum(n=1000000000) }}": "'lipsum' is undefined",
    "{{ range(10**12) }}": "Range too big",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% include 'other' %}": "no loader",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_a_hostile_template_ends_at_its_limit(source: str) -> None:
    # It loads, because one message does not reach the hostile part.
    template = ChatTemplate(f"{{% if messages[0].go %}}{source}{{% endif %}}", where="t", special_tokens={})
    with pytest.raises(RequestError) as caught:
        template.render([{**ONE[0], "go": True}], add_generation_prompt=True, max_steps=1_000_000)
    assert HOSTILE[source] in str(caught.value)
    assert "chat template" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10**9 }}", repeated(repeated("")), "{{ tools | center(10**9) }}"]
)
def test_a_template_that_exceeds_a_limit_on_one_message_does_not_load(tmp_path: Path, source: str) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=source)
    with pytest.raises(
        ModelLoadError, match=r"limit on a conversation of one message: it (makes|takes)"
    ) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_for_tools_is_tried_too(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=CHATML_TEMPLATE)
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools[0].function.name * 10**9 }}")
    with pytest.raises(ModelLoadError, match="it makes a value of more than"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json", "chat_template.json"])
@pytest.mark.parametrize(
    ("source", "problem"),
    [("x" * 300_000, "300000 characters"), ("{{ [" + 20_000 * "1," + "] }}", "more than 20000 nodes")],
    ids=["characters", "nodes"],
)
def test_a_template_of_any_file_is_bounded_in_size(
    tmp_path: Path, name: str, source: str, problem: str
) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 21 + "{% endfor %}" * 21,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if a %}" * 300 + "{% endif %}" * 300,
        "{{ " + "9" * 5000 + " }}",
        "{{ 'x' | no_such_filter }}",
    ],
    ids=["loops", "parentheses", "conditions", "digits", "filter"],
)
def test_a_template_that_python_cannot_compile_does_not_load(source: str) -> None:
    with pytest.raises(ModelLoadError, match="not a valid Jinja template") as caught:
        ChatTemplate(source, where="t", special_tokens={})
    assert "\n" not in str(caught.value)


AGENT: Final = """{%- for m in messages %}{%- if m.role == 'assistant' and loop.index0 % 10 == 1 %}
{%- set later = namespace(found=false) %}{%- for n in messages[loop.index:] %}
{%- if n.role == 'assistant' and 'tool_calls' not in n %}{%- set later.found = true %}{%- endif %}
{%- endfor %}{{- later.found }}{%- endif %}{{- m.role }}{%- endfor %}"""


@pytest.mark.parametrize("source", [CHATML_TEMPLATE, AGENT], ids=["chatml", "every later message"])
def test_ten_thousand_messages_render(source: str) -> None:
    num_messages = 10_000 if source == CHATML_TEMPLATE else 2_000
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"word {i} " * 20} for i in range(num_messages)
    ]
    ours = ChatTemplate(source, where="t", special_tokens={}).render(messages, add_generation_prompt=True)
    assert ours == plain(source, messages, None)


def test_steps_grow_with_the_messages() -> None:
    assert steps_of(1) == 20_000_001
    assert steps_of(10_000) == steps_of(1_000_000) == 120_000_000


def test_a_megabyte_of_tools_renders() -> None:
    source = "{%- for tool in tools %}{{- tool | tojson }}{{- tool | tojson(indent=4) }}{%- endfor %}"
    fields = {f"key{j}": {"type": "string", "description": "x" * 50} for j in range(8)}
    tools = [{"name": f"f{i}", "description": "d" * 300, "parameters": fields} for i in range(1000)]
    ours = ChatTemplate(source, where="t", special_tokens={}).render(ONE, tools, add_generation_prompt=True)
    assert ours == plain(source, ONE, tools)
    assert len(ours) > 2 << 20


def plain(source: str, messages: list[dict[str, Any]], tools: Any) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)


SAME: Final = (
    "{{ 'a' ~ 1 ~ none ~ [2] }}|{{ 3 * 'ab' + '!' }}|{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 1 / 4 }}{{ -3 + 1.5 }}",
    "{{ '%s %5d %-3s%%' % ('a', 7, 'b') }}|{{ '%(k)s' % {'k': 1} }}|{{ '%s-%s' | format(1, 2) }}",
    ("{{ '{} {0}'.format if false }}{{ '{:>5}|{!r}|{a[k]}'.format(1, 'q', a={'k': 2}) }}"
     "{{ '{k}'.format_map({'k': 3}) }}"),
    ("{{ ' a b '.strip().split(' ') | join('+') }}{{ 'a.b'.rsplit('.', 1)[-1] }}"
     "{{ ', '.join(['x', 'y'] | map('upper')) }}"),
    "{{ [3, 1, 2] | sort | reverse | list }}{{ [1, 2, 2] | unique | list }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ [1, 2, 3, 4, 5] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}{{ 1.25 | round(1) }}",
    ("{{ messages | map(attribute='role') | list }}"
     "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"),
    "{{ messages | selectattr('name', 'defined') | list }}{{ (messages | last).content }}{{ messages | length }}",
    "{{ 'a\nb' | indent(2, true) }}{{ 'abc' | replace('b', 'xx') }}{{ 'aXbX'.replace('X', 'yy') }}{{ '<' | e }}",
    ("{{ 'x' in 'xyz' }}{{ 'q' not in ['q'] }}{{ 1 in {1: 2} }}{{ 'k' in messages[0] }}"
     "{{ 1 < 2 < 3 }}{{ [1] == [1] }}"),
    ("{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}/{{ loop.length }}{{ a }}{{ loop.last }}"
     "{{ loop.previtem }};{% endfor %}"),
    ("{% for a in [[1, [2]], [3]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}"
     "{{ a }}{% endif %}{% endfor %}"),
    ("{% macro f(a, b=2) %}[{{ a }}{{ b }}{{ caller() if caller }}]{% endmacro %}{{ f(1) }}"
     "{% call f(3) %}in{% endcall %}"),
    ("{% for a in [] %}{% else %}none{% endfor %}{% set x %}a{{ 1 }}{% endset %}{{ x }}"
     "{% filter upper %}ab{% endfilter %}"),
    ("{{ messages[::-1][0].content }}{{ 'abc'[1:] }}{{ (1, 2)[0] }}{{ {'a': 1}.items() | list }}"
     "{{ {'a': 1}.get('b', 5) }}"),
    ("{% set j = joiner(',') %}{% for a in 'xy' %}{{ j() }}{{ a }}{{ loop.cycle('o', 'e') }}"
     "{{ loop.changed(a) }}{% endfor %}"),
    ("{{ 'a b' | title }}{{ ' x ' | trim }}{{ 'abc' | first }}{{ '5' | int + 1 }}{{ 5 is odd }}"
     "{{ 6 is divisibleby(3) }}"),
    ("{{ ('<b>' | safe) ~ '<' }}{% autoescape true %}{{ '<' }}{{ '<' ~ '>' }}"
     "{{ ('{}' | safe).format('<') }}{% endautoescape %}"),
    ("{% block a %}{{ messages[0].role }}{% endblock %}{{ self.a() }}{{ dict(a=1) }}{{ nothing }}"
     "{{ nothing | default('d') }}"),
)  # fmt: skip


@pytest.mark.parametrize("source", SAME)
def test_ordinary_templates_render_as_plain_jinja(source: str) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    ours = ChatTemplate(source, where="t", special_tokens={}).render(messages, add_generation_prompt=True)
    assert ours == plain(source, messages, None)


def test_a_template_that_exceeds_a_limit_is_not_tried_in_other_forms(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content * 10**9 if m.content == 'go' }}{% endfor %}"
    write_tiny_tokenizer(tmp_path, chat_template=source)
    tokenizer = Tokenizer.load(tmp_path)
    tries = []

    def render(turns: list[dict[str, Any]]) -> str:
        tries.append(turns)
        return tokenizer.apply_chat_template(turns)

    with pytest.raises(TemplateLimitExceededError, match=SIZE):
        rendered([{"role": "user", "content": "go"}], tokenizer, render)
    assert len(tries) == 1


def test_a_clients_variable_cannot_replace_the_budget() -> None:
    template = ChatTemplate("{{ 'x' * 10**9 if go }}", where="t", special_tokens={})
    with pytest.raises(RequestError, match=SIZE):
        template.render(ONE, variables={"go": True, " budget": None}, add_generation_prompt=True)


def test_a_budget_counts_shared_values_as_often_as_they_occur() -> None:
    inner = ["ab", 1]
    size = Budget().measure([inner, {"k": inner}])
    assert (size.elements, size.levels) == (1 + 2 + 2 + 2 + 2, 4)
    with pytest.raises(TemplateLimitError, match="more than 10 steps"):
        Budget(10).measure([inner] * 4)


def test_large_numbers_are_refused() -> None:
    for operator, left, right in (("**", 2, 20_000), ("*", 1 << 20_000, 1), ("**", 2, -20_000)):
        with pytest.raises(TemplateLimitError, match=BITS):
            check_numbers(operator, left, right)
    check_numbers("**", 2.0, 20_000)
    check_numbers("*", 1 << 9_000, 1 << 9_000)
