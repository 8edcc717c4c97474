"""Answers of every dialect, whole and cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.events import Event

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": ["boolean", "null"]},
    "where": {"$ref": "#/$defs/place"},
    "unit": {"enum": ["C", "F"]},
    "limit": {"anyOf": [{"type": "number"}, {"type": "string"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"place": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
# Line breaks at either end of a value are part of it; quotes and backslashes need escapes in JSON.
TEXT = 'a "b"\n\\c ✓\n'


class Answer(NamedTuple):
    """Parts of a whole answer."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


class Case(NamedTuple):
    tool: str | None
    reasoning: str | None
    text: str
    expected: Answer
    opened: bool = False


def call(**arguments: Any) -> tuple[str, Any]:
    return "f", arguments


CALL_JSON = json.dumps({"city": TEXT, "days": 2}, ensure_ascii=False)
TWO = (call(city=TEXT, days=2), ("g", {}))
XML_VALUES = {"city": TEXT, "days": "2", "exact": "True", "where": '{"x": [1]}', "unit": "C", "limit": "1.5"}
XML_READ = call(city=TEXT, days=2, exact=True, where={"x": [1]}, unit="C", limit=1.5)
CASES = {
    "hermes": Case(
        "hermes", "qwen3",
        "<think>\nWhich <tool_call>?\n</think>\n\nLet me see.\n"
        f'<tool_call>\n{{"name": "f", "arguments": {CALL_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        Answer("Let me see.", "Which <tool_call>?", TWO),
    ),
    "hermes-other-order-and-raw-line-break": Case(
        "hermes", None,
        '<tool_call>{"arguments": {"city": "a\nb"}, "id": [1], "name": "f"}</tool_call>'
        r'<tool_call>{"name": "f", "arguments": "{\"days\": 1}"}<tool_call>{"name": "g"}',
        Answer("", "", (call(city="a\nb"), call(days=1), ("g", {}))),
    ),
    "hermes-as-python-prints": Case(
        "hermes", None,
        "<tool_call>\n{'name': 'f', 'arguments': {'city': \"it's\", 'where': {'x': [None, True, 'a\\'b']}}}\n"
        "</tool_call>",
        Answer("", "", (call(city="it's", where={"x": [None, True, "a'b"]}),)),
    ),
    "hermes-mark-in-text": Case(
        "hermes", None,
        'A call begins with <tool_call>, then {"name": "f"}.\n',
        Answer('A call begins with <tool_call>, then {"name": "f"}.\n'),
    ),
    "hermes-damaged-arguments": Case(
        "hermes", None,
        'I try\n<tool_call>{"name": "f", "arguments": {"city": nowhere}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n',
        Answer(
            'I try\n<tool_call>{"name": "f", "arguments": {"city": nowhere}}</tool_call>', "", (("g", {}),)
        ),
    ),
    "hermes-cut-off": Case(
        "hermes", "qwen3", 'x\n<tool_call>{"name": "f", "arguments": {"city": "Par',
        Answer('x\n<tool_call>{"name": "f", "arguments": {"city": "Par'),
    ),
    "qwen3_coder": Case(
        "qwen3_coder", "qwen3",
        "The user wants…\n</think>\n\nok\n\n<tool_call>\n<function=f>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in XML_VALUES.items())
        + "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        Answer("ok", "The user wants…", (XML_READ, ("g", {}))),
        opened=True,
    ),
    "qwen3_coder-first-mark-left-out": Case(
        "qwen3_coder", None, "<function=f>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
        Answer("", "", (call(days="many"),)),
    ),
    "seed_oss": Case(
        "seed_oss", "seed_oss",
        "<seed:think>hm</seed:think>\nok\n<seed:tool_call>\n<function=f>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in XML_VALUES.items())
        + "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        Answer("ok", "hm", (XML_READ, ("g", {}))),
    ),
    "seed_oss-without-its-end": Case(
        "seed_oss", "seed_oss",
        "<seed:think>hm</seed:think>ok<seed:tool_call>\n<function=f>\n<parameter=days>2</parameter>\n",
        Answer("ok<seed:tool_call>\n<function=f>\n<parameter=days>2</parameter>\n", "hm"),
    ),
    "seed_oss-without-line-breaks": Case(
        "seed_oss", None,
        "<seed:tool_call><function=f><parameter=days>2</parameter></function></seed:tool_call>",
        Answer("", "", (call(days=2),)),
    ),
    "glm45": Case(
        "glm45", "glm45",
        "\n<think>hm</think>\nok\n<tool_call>f\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in XML_VALUES.items())
        + "</tool_call>\n<tool_call>g\n</tool_call>",
        Answer("ok", "hm", (XML_READ, ("g", {}))),
    ),
    "glm47": Case(
        "glm47", "glm45",
        "hm</think>ok<tool_call>f<arg_key>city</arg_key><arg_value>x</arg_value></tool_call><tool_call>g</tool_call>",
        Answer("ok", "hm", (call(city="x"), ("g", {}))),
        opened=True,
    ),
    "hy_v3": Case(
        "hy_v3", "hy_v3",
        "hm</think:opensource>ok<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n"
        + "".join(
            f"<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n"
            for key, value in XML_VALUES.items()
        )
        + "</tool_call:opensource>\n<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        Answer("ok", "hm", (XML_READ, ("g", {}))),
        opened=True,
    ),
    "hy_v3_preview": Case(
        "hy_v3_preview", "hy_v3_preview",
        "<think></think><tool_calls><tool_call>g<tool_sep></tool_call></tool_calls>",
        Answer("", "", (("g", {}),)),
    ),
    "hy_v3-without-a-separator": Case(
        "hy_v3_preview", None, "<tool_calls><tool_call>g</tool_call></tool_calls>",
        Answer("<tool_calls><tool_call>g</tool_call></tool_calls>"),
    ),
    "solar_open": Case(
        "solar_open", "solar_open",
        "<|think|>hm<|end|><|begin|>assistant<|content|>ok<|end|><|begin|>assistant<|tool_calls|>"
        f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{CALL_JSON}<|tool_call:end|>"
        "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        Answer("ok", "hm", TWO),
    ),
    "solar_open-without-thinking": Case("solar_open", "solar_open", "<|content|>ok\n", Answer("ok\n")),
    "solar_open-without-a-name": Case(
        "solar_open", None, "<|tool_calls|><|tool_call:begin|>a<|tool_call:args|>{}<|tool_call:end|>",
        Answer("<|tool_calls|><|tool_call:begin|>a<|tool_call:args|>{}<|tool_call:end|>"),
    ),
    "minimax_m2": Case(
        "minimax_m2", "minimax_m2",
        'hm\n</think>\n\nok\n<minimax:tool_call>\n<invoke name="f">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in XML_VALUES.items())
        + '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        Answer("ok", "hm", (XML_READ, ("g", {}))),
        opened=True,
    ),
    "deepseek_v32": Case(
        "deepseek_v32", "deepseek_r1",
        'hm</think>ok\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="city" string="true">{TEXT}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        Answer("ok", "hm", TWO),
        opened=True,
    ),
    "deepseek_v32-text-beside-the-schema": Case(
        "deepseek_v32", None,
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="days" string="true">2'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        Answer("", "", (call(days="2"),)),
    ),
    "deepseek_v3": Case(
        "deepseek_v3", "deepseek_r1",
        "<think>\nhm\n</think>\n\nok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        f"```json\n{CALL_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer("ok", "hm", TWO),
    ),
    "deepseek_v31": Case(
        "deepseek_v31", "deepseek_r1",
        f"ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{CALL_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Answer("ok", "", TWO),
    ),
    "kimi_k2-calls-end-the-thinking": Case(
        "kimi_k2", "kimi_k2",
        "<think>hm <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{CALL_JSON}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        Answer("", "hm", TWO),
    ),
    "mistral": Case(
        "mistral", "mistral",
        f'[THINK]hm[/THINK]ok[TOOL_CALLS] [{{"name": "f", "arguments": {CALL_JSON}, "id": "1"}}, '
        '{"name": "g", "arguments": {}}]',
        Answer("ok", "hm", TWO),
    ),
    "mistral-since-2025": Case(
        "mistral", None, f"ok[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{CALL_JSON}[TOOL_CALLS]g[ARGS]{{}}",
        Answer("ok", "", TWO),
    ),
    "harmony": Case(
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        f"<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{CALL_JSON}<|call|>",
        Answer("I look it up.", "One.\nTwo.", TWO[:1]),
    ),
    "harmony-recipient-behind-the-channel": Case(
        "openai", "openai_gptoss", "<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}",
        Answer("", "", TWO[1:]),
    ),
    "harmony-final": Case(
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 20 °C.\n",
        Answer("It is 20 °C.\n", "hm"),
    ),
    "harmony-tool-of-its-own": Case(
        "openai", "openai_gptoss", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        Answer("<|channel|>analysis to=python code<|message|>1 + 1"),
    ),
    "harmony-without-marks": Case("openai", "openai_gptoss", "once upon a time", Answer("once upon a time")),
    "llama4_json": Case(
        "llama4_json", None,
        f'{{"type": "function", "name": "f", "parameters": {CALL_JSON}}}; {{"name": "g", "parameters": {{}}}}',
        Answer("", "", TWO),
    ),
    "llama4_json-that-is-an-answer": Case(
        "llama4_json", None, '{"name": "Ada", "age": 36}', Answer('{"name": "Ada", "age": 36}')
    ),
    "llama4_pythonic": Case(
        "llama4_pythonic", None,
        "[f(city='a \"b\"\\n\\\\c \\u2713\\n', days=2), g()]",
        Answer("", "", TWO),
    ),
    "llama4_pythonic-values": Case(
        "llama4_pythonic", None,
        "<|python_start|>[f(days=-1.5e3, where={'x': [None, True], 'y': ()}, city=\"it's\",)]<|python_end|>",
        Answer("", "", (call(days=-1500.0, where={"x": [None, True], "y": []}, city="it's"),)),
    ),
    "llama4_pythonic-that-is-a-link": Case("llama4_pythonic", None, "[here](https://a.b)", Answer("[here](https://a.b)")),
    "lfm2": Case(
        "lfm2", "qwen3",
        '<|tool_call_start|>[f(city="x", days=2)]<|tool_call_end|>I look it up.',
        Answer("I look it up.", "", (call(city="x", days=2),)),
    ),
    "lfm2-json": Case(
        "lfm2", None,
        f'<|tool_call_start|>[{{"name": "f", "arguments": {CALL_JSON}}}, {{"name": "g", "arguments": {{}}}}]'
        "<|tool_call_end|>",
        Answer("", "", TWO),
    ),
    "granite": Case(
        "granite", "granite",
        "Here is my thought process: hm Here is my response: ok "
        f'<|tool_call|>[{{"name": "f", "arguments": {CALL_JSON}}}, {{"name": "g", "arguments": {{}}}}]',
        Answer("ok", "hm", TWO),
    ),
    "gemma4": Case(
        "gemma4", "gemma4",
        "<|channel>thought\nhm\n<channel|>ok"
        f'<|tool_call>call:f{{city:<|"|>{TEXT}<|"|>,days:2,where:{{x:[1,true,<|"|>z<|"|>]}}}}<tool_call|>'
        "<|tool_call>call:g{}<tool_call|>",
        Answer("ok", "hm", (call(city=TEXT, days=2, where={"x": [1, True, "z"]}), ("g", {}))),
    ),
    "ernie45": Case(
        "hermes", "ernie45", "<think>\nhm\n</think>\n\n<response>\nHello\n</response>\n", Answer("\nHello\n", "hm")
    ),
    "hunyuan": Case(
        "hunyuan_a13b", "hunyuan_a13b",
        f'<think>\nhm\n</think>\n<answer>\nok<tool_calls>[{{"name": "f", "arguments": {CALL_JSON}}}, '
        '{"name": "g", "arguments": {}}]</tool_calls>\n</answer>',
        Answer("\nok", "hm", TWO),
    ),
    "hunyuan-without-an-end": Case(
        "hunyuan_a13b", None, f'<tool_calls>[{{"name": "f", "arguments": {CALL_JSON}}}', Answer("", "", TWO[:1])
    ),
    "thinking-without-an-end": Case(None, "deepseek_r1", " <think> hm\n", Answer("", "hm\n")),
    "no-thinking": Case(None, "deepseek_r1", "\nA <think> is a mark.\n", Answer("\nA <think> is a mark.\n")),
}  # fmt: skip


def parsed(case: Case, pieces: Sequence[str]) -> list[Event]:
    parser = AnswerParser(case.tool, case.reasoning, TOOLS, reasoning_opened=case.opened)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def joined(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """Parts without random ids and hidden text; neighbours of one kind are merged."""
    found: list[tuple[str, str, int]] = []
    for event in events:
        if event.kind == "skipped":
            continue
        if found and (found[-1][0], found[-1][2]) == (event.kind, event.number) and event.kind != "call":
            found[-1] = (event.kind, found[-1][1] + event.text, event.number)
        else:
            found.append((event.kind, event.text, event.number))
    return found


def answer_of(events: Sequence[Event]) -> Answer:
    """Answer as a client sees it, but with parsed arguments."""
    texts: dict[str, str] = {"content": "", "reasoning": ""}
    calls: dict[int, list[str]] = {}
    for event in events:
        if event.kind == "call":
            calls[event.number] = [event.text, ""]
        elif event.kind == "arguments":
            calls[event.number][1] += event.text
        elif event.kind == "call_damaged":
            del calls[event.number]
            texts["content"] += event.text
        elif event.kind in texts:
            texts[event.kind] += event.text
    read = tuple((name, json.loads(arguments)) for name, arguments in calls.values())
    return Answer(texts["content"], texts["reasoning"], read)


def check(case: Case, text: str, rng: random.Random) -> None:
    """Whatever the text is: nothing is lost, the cutting does not matter, and each call has its JSON."""
    events = parsed(case, [text])
    assert "".join(event.raw for event in events) == text
    for _, arguments in answer_of(events).calls:
        assert isinstance(arguments, dict)
    for num_cuts in (rng.randrange(8), min(len(text), 400)):
        cuts = sorted(rng.choices(range(len(text) + 1), k=num_cuts))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        again = parsed(case, pieces)
        assert joined(again) == joined(events), pieces
        assert "".join(event.raw for event in again) == text
