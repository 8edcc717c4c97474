"""Converts a chat's fields to the variables of the model's chat template.

Agents send these fields without knowing the model, so a field without a template variable is ignored and logged.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from twofold.server.bridge.models.protocol import ServingTokenizer
from twofold.server.openai.template_fields import TemplateFields

_logger = logging.getLogger("twofold.server")
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that switch thinking."""
_WITHOUT_THINKING: Final = ("none", "minimal")
"""Efforts that switch thinking off if the template has a switch."""


def template_variables(body: TemplateFields, tokenizer: ServingTokenizer) -> dict[str, Any]:
    """Variables for the template; chat_template_kwargs override the other fields."""
    given = body.chat_template_kwargs or {}
    effort, thinks = body.effort, body.thinks
    if thinks is None and effort is not None:
        thinks = effort not in _WITHOUT_THINKING
    made: dict[str, Any] = {} if thinks is None else dict(thinking_variables(tokenizer, thinks))
    named = {"reasoning_effort": effort, "verbosity": body.verbosity}
    made |= {
        name: value
        for name, value in named.items()
        if value is not None and name in tokenizer.template_variables
    }
    for name in _unread(body, made):
        _report_ignored(name, tokenizer.chat_template)
    return made | given


def thinking_variables(tokenizer: ServingTokenizer, thinks: bool) -> dict[str, bool]:
    """Template variables that switch thinking; empty if the template has no switch."""
    return {name: thinks for name in _SWITCHES if name in tokenizer.template_variables}


def thinking_is_off(variables: Mapping[str, Any]) -> bool:
    """Whether the variables given to the template switch its thinking off."""
    return any(variables.get(name) is False for name in _SWITCHES)


def reads_effort(tokenizer: ServingTokenizer) -> bool:
    """Whether the template reads an effort, or at least a thinking switch."""
    return "reasoning_effort" in tokenizer.template_variables or bool(thinking_variables(tokenizer, True))


def _unread(body: TemplateFields, made: dict[str, Any]) -> Iterator[str]:
    thinking = made.keys() - {"verbosity"}
    for name in ("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking"):
        requested = body.thinks is not None or body.effort is not None if name == "reasoning" else True
        if getattr(body, name) is not None and requested and not thinking:
            yield name
    if body.verbosity is not None and "verbosity" not in made:
        yield "verbosity"


@functools.lru_cache(maxsize=64)
def _report_ignored(name: str, chat_template: str | None) -> None:
    """Log once per field and template: agents send it with every request."""
    _logger.warning("%s is ignored: this model's chat template has no variable for it", name)
