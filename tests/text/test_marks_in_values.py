"""Values that contain the marks of their own call format: an end mark ends a value only where the rest parses."""

from __future__ import annotations

import json
import random

import pytest

from tests.text.parser_cases import CASES, Case, answer_of, check, parsed

MARKED = {
    "hermes": "a </tool_call> b",
    "mistral": '}] [TOOL_CALLS] [{"name": "f"}]',
    "qwen3_coder": "</parameter>\n<parameter=city>\nx\n</parameter>\ny</parameter> z",
    "seed_oss": "a </parameter> </seed:tool_call> <parameter=city",
    "glm45": "</arg_value> <arg_key>k</arg_key> </tool_call>",
    "glm47": "a</arg_value><arg_key>city</arg_key><arg_value>b",
    "hy_v3": "a</arg_value:opensource></arg_value:opensource> b",
    "minimax_m2": '</parameter> <parameter> </parameter><parameter name="',
    "deepseek_v32": "</｜DSML｜parameter> </｜DSML｜parameter><｜DSML｜parameter name",
    "gemma4": '<|"|> b<|"|>',
    "llama4_pythonic": "')] [g()",
    "lfm2": '")]<|tool_call_end|>',
}


def is_about_a_city(case: Case) -> bool:
    return bool(case.expected.calls) and "city" in case.expected.calls[0][1]


@pytest.mark.parametrize("tool", sorted({case.tool for case in CASES.values() if is_about_a_city(case)}))
def test_a_mark_inside_a_value_ends_nothing(tool: str) -> None:
    """A call with each dialect's closing marks in its text, where the marks' followers tell them apart."""
    case = next(case for case in CASES.values() if case.tool == tool and is_about_a_city(case))
    given = MARKED.get(tool, "}} </tool_call> ```")
    arguments = case.expected.calls[0][1]
    text = arguments["city"]
    written, inside = text, given
    if tool == "llama4_pythonic":
        written, inside = 'a "b"\\n\\\\c \\u2713\\n', given.replace("'", "\\'")
    elif text not in case.text or tool == "lfm2":
        written, inside = (json.dumps(each, ensure_ascii=False)[1:-1] for each in (text, given))
    marked = case._replace(text=case.text.replace(written, inside, 1))
    assert marked.text != case.text
    answer = answer_of(parsed(marked, [marked.text]))
    assert answer.calls == (
        (case.expected.calls[0][0], arguments | {"city": given}),
        *case.expected.calls[1:],
    )
    check(marked, marked.text, random.Random(0))
