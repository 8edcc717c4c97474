"""Calls of the `tokenizers` package that its files or clients' texts can make fail.

The package raises plain Exception for most faults. Its Rust code panics on others, with an exception that is no
Exception: it would pass every handler and end the engine's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import tokenizers

from twofold.api.errors import ModelLoadError, RequestError

_MAX_REASON_CHARS: Final = 200


def failure_of(error: BaseException) -> str:
    """One line about an error or panic of the package. Raises `error` again if it is another program's end."""
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def encode_texts(
    backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool = False
) -> list[list[int]]:
    """Token ids of each text. RequestError for text that the tokenizer cannot encode."""
    try:
        # The batch call releases the GIL; `encode` does not, and 1 MB of text would block every thread for 0.6 s.
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError):
        raise RequestError(
            "text is not valid Unicode, expected no lone surrogates; fix its encoding"
        ) from None
    except BaseException as error:
        raise RequestError(
            f"the model's tokenizer cannot encode this text: {failure_of(error)}; send another text"
        ) from None
    return [encoding.ids for encoding in encodings]


def decode_ids(backend: tokenizers.Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Text of the ids; one U+FFFD for each id if the tokenizer's decoder fails, so that an answer goes on."""
    try:
        text: str = backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        failure_of(error)
        return "\ufffd" * len(token_ids)
    return text


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """ModelLoadError if the package panics while the tokenizer of `path` is read and tried."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelLoadError(
            f"{path}: the tokenizer fails on every text: {failure_of(error)}; download it again"
        ) from None


def try_backend(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode a short text. A vocabulary may lack its letters; only a panic is an error."""
    with contextlib.suppress(Exception):
        backend.decode(backend.encode("a").ids)
