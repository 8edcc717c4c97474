"""The path of a model that a command names: a path itself, or a model of a hub, downloaded if it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

from twofold.hub.pull import Report, find_cached, local_model, local_tokenizer
from twofold.hub.reference import parse_hub_name
from twofold.tools.cli.bar import Bar

MODEL_NAME_HELP = "or ORG/REPO[:QUANT][@REVISION] of a hub, which is downloaded"


def model_path(text: str, revision: str | None = None) -> Path:
    """The path that `text` names. ConfigError: malformed name. ModelLoadError: the hub does not have it."""
    model = parse_hub_name(text, revision)
    if model is None:
        return Path(text).expanduser()
    with Bar("downloading", "GB", 1e-9) as bar:
        return local_model(model, bar_report(bar)).path


def tokenizer_path(text: str) -> str:
    """As `model_path`, without weights."""
    model = parse_hub_name(text)
    if model is None:
        return text
    with Bar("downloading", "MB", 1e-6) as bar:
        return str(local_tokenizer(model, bar_report(bar)))


def served_name(text: str) -> str:
    """The name under which a server shows the model that `text` names. Downloads nothing."""
    from twofold.weights.gguf_file import model_name

    model = parse_hub_name(text)
    found = find_cached(model) if model is not None else None
    return model_name(str(found.path)) if found is not None else str(model or model_name(text))


def served_names(text: str) -> tuple[str, ...]:
    """Names by which clients may ask for a model of a hub: its own and `text`. None for a path, which has its own."""
    return (served_name(text), text) if parse_hub_name(text) is not None else ()


def bar_report(bar: Bar) -> Report:
    """Lines to stderr, bytes to the bar."""
    return Report(
        line=lambda text: print(text, file=sys.stderr),
        progress=lambda done, total, name: bar.show(done, total, name.rpartition("/")[2][-40:]),
    )
