"""Tool calls and results of a conversation: arguments as objects, and ids that pair them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from twofold.text.conversation.repairs import report
from twofold.text.conversation.surrogates import whole_characters
from twofold.text.tokenizer import ToolForm

Turn = dict[str, Any]
"""A message in OpenAI's form, with text as content and JSON text as arguments of calls."""

MAX_ID: Final = 256
_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS: Final = string.ascii_letters + string.digits
_MAX_ENCODINGS: Final = 3
"""Most times that arguments may be encoded as JSON text."""
DAMAGED: Final = "invalid_arguments"
"""Key of arguments that are no JSON object; its value is their text."""


def arguments_of(text: str) -> dict[str, Any]:
    """A call's arguments as an object, also if they are missing, encoded twice or damaged."""
    value: Any = text
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(value, str) or not value.strip():
            break
        try:
            value = json.loads(whole_characters(value))
        except (ValueError, RecursionError):
            break
    if isinstance(value, dict):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    report("damaged arguments")
    return {DAMAGED: text}


def paired(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with an id in each call and result. A result without a known id belongs to the last message's first
    call that has none, and whose name is the result's, if both are given."""
    answered = {_bounded(turn.get("tool_call_id") or "") for turn in turns if turn["role"] == "tool"}
    known: set[str] = set()
    waiting: list[tuple[str, str]] = []
    """Names and ids of calls for results without a known id."""
    num_calls = 0
    pairs: list[Turn] = []
    for turn in turns:
        if turn.get("tool_calls"):
            calls = []
            for call in turn["tool_calls"]:
                # Nine letters and digits, which all templates take.
                calls.append(call | {"id": _bounded(call.get("id") or "") or f"call{num_calls:05d}"})
                num_calls += 1
            turn = turn | {"tool_calls": calls}
            known |= {call["id"] for call in calls}
            waiting = [(call["function"]["name"], call["id"]) for call in calls if call["id"] not in answered]
        elif turn["role"] == "tool":
            call_id = _bounded(turn.get("tool_call_id") or "")
            if call_id not in known and waiting:
                fitting = [one for one in waiting if turn.get("name") in (None, one[0])] or waiting
                waiting.remove(fitting[0])
                call_id = fitting[0][1]
                report("results by order")
            turn = turn | {"tool_call_id": call_id or f"call{num_calls:05d}"}
        pairs.append(turn)
    return _completed(pairs)


def no_result(call: Mapping[str, Any]) -> Turn:
    """A result for a call that has none."""
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "[no result]"}


def _completed(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with a result for each call of a message whose other calls have one: templates count them."""
    answered = {turn["tool_call_id"] for turn in turns if turn["role"] == "tool"}
    completed: list[Turn] = []
    missing: list[Turn] = []
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        completed.append(turn)
        if turn.get("tool_calls"):
            missing = [no_result(call) for call in turn["tool_calls"] if call["id"] not in answered]
        ends_results = turn["role"] == "tool" and (following is None or following["role"] != "tool")
        if missing and ends_results:
            report("missing message")
            completed += missing
            missing = []
    return completed


def in_form(turns: Sequence[Turn], form: ToolForm) -> list[Turn]:
    """The turns with calls as the template expects them."""
    if not form.shows_ids:
        turns = _results_in_order(turns)
    if not form.several:
        turns = _one_call_each(turns)
    return [_in_form(turn, form) for turn in turns]


def as_text(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with calls and results as text, for templates that render none."""
    names: dict[str, str] = {}
    written: list[Turn] = []
    for turn in turns:
        turn = dict(turn)
        lines = []
        for call in turn.pop("tool_calls", None) or ():
            function = call["function"]
            arguments = function["arguments"]
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            names[call["id"]] = function["name"]
            lines.append(f"Call of {function['name']}: {arguments}")
        if turn["role"] == "tool":
            turn = result_as_user(turn, names.get(turn.get("tool_call_id", ""), ""))
        elif lines:
            turn["content"] = "\n".join(filter(None, (turn["content"], *lines)))
        written.append(turn)
    return written


def result_as_user(turn: Turn, name: str = "") -> Turn:
    """A tool's result as the user's message."""
    name = name or turn.get("name") or "a tool"
    return {"role": "user", "content": f"Result of {name}: {turn['content']}"}


def _in_form(turn: Turn, form: ToolForm) -> Turn:
    turn = dict(turn)
    if "tool_call_id" in turn:
        turn["tool_call_id"] = _id_in_form(turn["tool_call_id"], form)
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        function = dict(call["function"])
        arguments, given = arguments_of(function["arguments"]), function["arguments"]
        if form.arguments_as_text:
            same = (
                whole_characters(given)
                if given.strip().startswith("{") and DAMAGED not in arguments
                else None
            )
            function["arguments"] = same or json.dumps(arguments, ensure_ascii=False)
        else:
            function["arguments"] = arguments
        calls.append({**call, "id": _id_in_form(call["id"], form), "function": function})
    turn["tool_calls"] = calls
    if form.null_content and not turn["content"]:
        turn["content"] = None
    return turn


def _results_in_order(turns: Sequence[Turn]) -> list[Turn]:
    """Results after one message in the order of its calls: the template shows no ids, so that only order pairs them."""
    places: dict[str, int] = {}
    ordered: list[Turn] = []
    block: list[Turn] = []

    def flush() -> None:
        sorted_block = sorted(block, key=lambda turn: places.get(turn["tool_call_id"], len(places)))
        if sorted_block != block:
            report("results by order")
        ordered.extend(sorted_block)
        block.clear()

    for turn in turns:
        if turn["role"] == "tool":
            block.append(turn)
            continue
        flush()
        places = {call["id"]: place for place, call in enumerate(turn.get("tool_calls") or ())}
        ordered.append(turn)
    flush()
    return ordered


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Each call in a message of its own, directly followed by its result."""
    split: list[Turn] = []
    placed: set[int] = set()
    for index, turn in enumerate(turns):
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            if index not in placed:
                split.append(turn)
            continue
        report("one call per message")
        results = _results_after(turns, index)
        for number, call in enumerate(calls):
            split.append(
                (turn if number == 0 else {"role": "assistant", "content": ""}) | {"tool_calls": [call]}
            )
            place = results.get(call["id"])
            if place is not None and place not in placed:
                split.append(turns[place])
                placed.add(place)
    return split


def _results_after(turns: Sequence[Turn], index: int) -> Mapping[str, int]:
    """Call id → place of its result, up to the next message with calls."""
    found: dict[str, int] = {}
    for place in range(index + 1, len(turns)):
        if turns[place].get("tool_calls"):
            break
        if turns[place]["role"] == "tool":
            found.setdefault(turns[place]["tool_call_id"], place)
    return found


def _bounded(call_id: str) -> str:
    if len(call_id) <= MAX_ID:
        return call_id
    report("call ids")
    return f"call_{_hashed(call_id, 24)}"


def _id_in_form(call_id: str, form: ToolForm) -> str:
    """The same id always becomes the same one, in every request: prefixes stay equal."""
    if not form.short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    report("call ids")
    return _hashed(call_id, 9)


def _hashed(text: str, length: int) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest(), "big")
    letters: list[str] = []
    for _ in range(length):
        number, digit = divmod(number, len(_DIGITS))
        letters.append(_DIGITS[digit])
    return "".join(letters)


def holds_calls(turns: Iterable[Mapping[str, Any]]) -> bool:
    return any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns)
