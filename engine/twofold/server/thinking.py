"""Whether the model thinks, said by the variable that its chat template reads."""

from __future__ import annotations

from typing import Final

from twofold.server.protocol import ServingTokenizer

_SWITCHES: Final = ("enable_thinking", "thinking")


def thinking_variables(tokenizer: ServingTokenizer, thinks: bool) -> dict[str, bool]:
    """Variables for the template; none where it has no switch."""
    return {name: thinks for name in _SWITCHES if name in tokenizer.template_variables}
