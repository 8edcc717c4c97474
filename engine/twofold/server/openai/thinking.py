"""The chat template's variable that switches the model's thinking on or off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twofold.server.bridge.protocol import ServingTokenizer

_SWITCHES: Final = ("enable_thinking", "thinking")


def thinking_variables(tokenizer: ServingTokenizer, thinks: bool) -> dict[str, bool]:
    """Template variables that switch thinking; empty if the template has no switch."""
    return {name: thinks for name in _SWITCHES if name in tokenizer.template_variables}


def thinking_is_off(variables: Mapping[str, Any]) -> bool:
    """Whether the variables given to the template switch its thinking off."""
    return any(variables.get(name) is False for name in _SWITCHES)
