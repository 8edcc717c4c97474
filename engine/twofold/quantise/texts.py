"""Text on which models are compared, as token sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from twofold.api.errors import ConfigError
from twofold.api.regular_file import read_regular_text
from twofold.models.model_files import ModelFiles
from twofold.text.tokenizer import Tokenizer

_MAX_TEXT_BYTES: Final = 1 << 30


def default_text() -> str:
    """The default comparison text: an English tale of a thousand words."""
    return Path(__file__).with_name("tale.txt").read_text(encoding="utf-8")


def read_text(file: str | None) -> str:
    """The text of --text; None: the tale. ConfigError: it cannot be read, or is not UTF-8."""
    if file is None:
        return default_text()
    try:
        return read_regular_text(Path(file).expanduser(), _MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {file}: not UTF-8 text at byte {error.start}; give a text file") from None
    except OSError as error:
        raise ConfigError(f"--text {file}: cannot be read: {error.strerror}") from None


def token_sequences(
    source: Path, files: ModelFiles, text: str, max_tokens: int, sequence_tokens: int = 512
) -> list[list[int]]:
    """The text's first tokens in independent sequences of up to `sequence_tokens`.

    source: directory of the tokenizer. ConfigError: fewer than two tokens.
    """
    tokens = Tokenizer.open(source, vocab_size=files.config.vocab_size).encode(text)[:max_tokens]
    length = min(sequence_tokens, files.config.max_context)
    pieces = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ConfigError(
            "--text has fewer than two tokens; give a file with some sentences, or --max-tokens 0"
        )
    return pieces
