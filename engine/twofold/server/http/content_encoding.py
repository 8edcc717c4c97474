"""Reads request bodies that a client or proxy has compressed (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from twofold.server.http.errors import ApiError

_PIECE_BYTES: Final = 256 * 1024
"""Largest piece that is decompressed at once, about a millisecond of work."""
_GZIP: Final = 16 + zlib.MAX_WBITS
_ACCEPTED: Final = "gzip, deflate, identity"


class BodyDecoder:
    """Decodes one body as it arrives."""

    def __init__(self, content_encoding: str) -> None:
        """content_encoding: the request's header; empty without one. ApiError 415 if the coding is not known."""
        self._coding = content_encoding.strip().lower().removeprefix("x-") or "identity"
        if self._coding not in ("gzip", "deflate", "identity"):
            raise ApiError(
                415,
                f"the body's Content-Encoding is {content_encoding[:100]!r}; send it as one of {_ACCEPTED}",
                code="unsupported_content_encoding",
                headers={"Accept-Encoding": _ACCEPTED},
            )
        self._stream = zlib.decompressobj(_GZIP) if self._coding == "gzip" else None
        self._held = b""
        """Bytes too few to tell which kind of deflate they are."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Decoded pieces of the next received bytes, each of bounded size. ApiError 400 if they are damaged."""
        if self._coding == "identity":
            yield data
            return
        data, self._held = self._held + data, b""
        if self._stream is None:
            if len(data) < 2:
                self._held = data
                return
            self._stream = zlib.decompressobj(_window_of_deflate(data))
        try:
            piece = b""
            # A full piece may leave more in the decoder although all of its input is taken.
            while data or (len(piece) == _PIECE_BYTES and not self._stream.eof):
                if self._stream.eof:
                    if self._coding == "deflate":
                        raise zlib.error("bytes follow its end")
                    self._stream = zlib.decompressobj(_GZIP)  # gzip may consist of several members
                piece = self._stream.decompress(data, _PIECE_BYTES)
                yield piece
                data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        except zlib.error as error:
            raise self._damaged(str(error)) from None

    def end(self) -> None:
        """Called after the last byte. ApiError 400 if the compressed body is incomplete."""
        if self._held or (self._stream is not None and not self._stream.eof):
            raise self._damaged("it ends too early")

    def _damaged(self, problem: str) -> ApiError:
        return ApiError(
            400,
            f"the body is not valid {self._coding} as its Content-Encoding says ({problem})",
            code="invalid_content_encoding",
        )


def _window_of_deflate(data: bytes) -> int:
    """zlib's window argument: the standard means zlib's format, and some clients send bare deflate data."""
    is_zlib = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS
