"""Reads tokenizer.json and refuses input that makes the `tokenizers` package panic: panics print a page to stderr, and
during encoding they would end a thread."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import tokenizers

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.backend_calls import failure_of
from twofold.text.tokenizer.bounded_file import read_bounded_text

_MISSING: Final = "missing; download it, or convert the model's tokenizer to tokenizer.json with transformers"
_PREFIX: Final = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer in this file. Raises ModelLoadError naming it."""
    text = read_bounded_text(path, if_missing=_MISSING)
    try:
        _check_prefix(text, path)
        backend = tokenizers.Tokenizer.from_str(text)
        _check_template(backend, path)
        return backend
    except ModelLoadError:
        raise
    except BaseException as error:
        raise ModelLoadError(
            f"{path}: not a valid tokenizer: {failure_of(error)}; download it again"
        ) from None


def _check_prefix(text: str, path: Path) -> None:
    """Check that continuation tokens begin with the prefix, which merging strips. Few vocabularies have one."""
    if _PREFIX.search(text) is None:
        return
    try:
        model = json.loads(text).get("model")
        size = len(model["continuing_subword_prefix"].encode())
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        short = next((pair for pair in pairs if not _is_cut_at(pair[1], size)), None)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        # Malformed; the package reports an error itself.
        return
    if short is not None:
        raise ModelLoadError(
            f"{path}: merges {short!r}, expected a second part of at least the {size} bytes of "
            "continuing_subword_prefix; download it again"
        )


def _is_cut_at(part: str, size: int) -> bool:
    """Whether the first `size` bytes are whole characters."""
    data = part.encode()
    return len(data) >= size and (len(data) == size or data[size] & 0xC0 != 0x80)


def _check_template(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Check that a template of special tokens around a text names only tokens that it defines."""
    if backend.post_processor is None:
        return
    level: list[Any] = [json.loads(backend.post_processor.__getstate__())]
    while level:
        processor = level.pop()
        level += processor.get("processors", ())
        pieces = [*processor.get("single", ()), *processor.get("pair", ())]
        if processor["type"] != "TemplateProcessing":
            continue
        named = {piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece}
        missing = sorted(named - processor["special_tokens"].keys())
        if missing:
            raise ModelLoadError(
                f"{path}: its post_processor puts {missing[0]!r} around texts, expected one of its special_tokens "
                f"{sorted(processor['special_tokens'])}; download it again"
            )
