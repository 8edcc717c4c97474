"""Checks that a model can call tools, which every agent of `twofold launch` needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.tools.cli.launch.agents import KEY_NAME

_REMEDY: Final = (
    "launch with a MODEL whose chat template takes tools, e.g. one of Qwen3, gpt-oss, GLM-4.5 or DeepSeek-V3"
)


def check_served_model(card: dict[str, Any], answer: dict[str, Any], url: str) -> None:
    """Refuse a running Twofold server's model that cannot call tools.

    Args:
        card: OpenAI's card of the model. Other servers do not state tool support: their models are accepted.
        answer: the whole GET /v1/models, with Ollama's cards next to OpenAI's.

    Raises:
        ConfigError: it cannot.
    """
    if card.get("owned_by") == "twofold" and "tools" not in answer["models"][0]["capabilities"]:
        raise ConfigError(
            f"{card['id']!r}, which {url} serves, cannot call tools, which agents need; {_REMEDY}"
        )


def check_model_to_serve(serve_arguments: Sequence[str]) -> None:
    """Same check for the model that `twofold serve` would serve with these arguments. Reads no weights.

    Raises:
        ConfigError: it cannot call tools, or an argument is wrong.
        ModelLoadError: the model's files cannot be used.
    """
    # These import torch.
    from twofold.api.config import ServerConfig
    from twofold.api.settings import from_namespace
    from twofold.models.registry import chat_marks, read_config
    from twofold.text.chat.marks import chosen_marks
    from twofold.text.tokenizer import Tokenizer
    from twofold.tools.cli.main import build_parser
    from twofold.tools.cli.model_options import engine_config
    from twofold.weights.gguf_file import model_name

    args = build_parser("serve").parse_args(["serve", *serve_arguments])
    # The server gets its own key there.
    environment = {name: value for name, value in os.environ.items() if name != KEY_NAME}
    engine, server = engine_config(args), from_namespace(ServerConfig, args, environment)
    config = read_config(Path(engine.model))
    tokenizer = Tokenizer.open(engine.tokenizer or engine.model)
    shown = chat_marks(config.architecture, tokenizer.chat_template)
    marks = chosen_marks(shown, server.tool_call_parser, server.reasoning_parser)
    name = model_name(engine.model)
    if "tools" not in tokenizer.template_variables:
        raise ConfigError(
            f"{name!r} cannot call tools, which agents need: its chat template renders none; {_REMEDY}"
        )
    if not marks.calls_tools(tokenizer.template_variables):
        raise ConfigError(
            f"{name!r} cannot call tools, which agents need: its chat template has no known form of calls; "
            "name the form by --server-args='--tool-call-parser NAME', or " + _REMEDY
        )
