"""Parses large request bodies in a process of its own.

Parsing 8 MB of JSON and checking it against a schema is one native call. It holds the interpreter lock for up to
seconds, depending on the body, and would stall every stream of this process. The worker is a separate interpreter that
knows only the schemas. It returns the request as JSON with only the fields of the schema, small enough that parsing it
again takes negligible time. It exits once a body has made it large, so that its memory returns to the system.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from twofold.server.http import errors as api_errors
from twofold.server.http.errors import ApiError
from twofold.text.conversation.surrogates import whole_characters

M = TypeVar("M", bound=BaseModel)
Limits = Mapping[str, tuple[int, str]]

_TIMEOUT_S: Final = 30.0
"""Time limit per body; any 8 MB body takes less than a second."""
_MAX_RSS_BYTES: Final = 256 * 1024 * 1024
"""A worker whose peak memory exceeds this exits after the answer."""
MAX_VALUES: Final = 65_536
"""Most values of a request besides its token ids: the result is parsed under the lock, in 10 ms."""
_LONG_TEXT: Final = 4096
"""Characters from which a text is returned beside the JSON instead of in it."""
_NICENESS: Final = 10
"""Niceness of the worker: large bodies yield to the engine's threads."""
_LENGTH: Final = struct.Struct("<Q")


def parse(schema: type[M], body: bytes, max_context: int, limits: Limits = MappingProxyType({})) -> M:
    """Parse `body` as `schema` in this process. ApiError 400 naming the field that is wrong.

    max_context: of any model. limits: of single models, see `ServerState.context_limits`.
    """
    context = {"max_context": max_context, "limits": limits}
    # RFC 8259 lets a parser ignore the byte-order mark that some editors and shells write.
    body = body.removeprefix(b"\xef\xbb\xbf")
    try:
        try:
            return schema.model_validate_json(body, context=context)
        except ValidationError as error:
            if "hex escape" not in error.errors(include_input=False)[0]["msg"]:
                raise
            return schema.model_validate_json(whole_characters(body), context=context)
    except ValidationError as error:
        raise api_errors.from_validation(error) from None


class BodyWorker:
    """The parsing process: started on first use, restarted after it exits. Thread-safe; one body at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process before its first body."""
        with self._lock:
            self._started()

    def parse(
        self, schema: type[M], body: bytes, max_context: int, limits: Limits = MappingProxyType({})
    ) -> M:
        """Run the function `parse` in the worker. Blocks. ApiError 500 when the worker dies or takes too long."""
        question = json.dumps([schema.__module__, schema.__name__, max_context, dict(limits)]).encode()
        with self._lock:
            try:
                channel = self._started()
                _send(channel, question)
                _send(channel, body)
                verdict, cleaned = _receive(channel, 2)
                refusal, is_large, mark, num_texts = json.loads(verdict)
                texts = {f"{mark}{n}": text.decode() for n, text in enumerate(_receive(channel, num_texts))}
            except (OSError, EOFError):
                self._end()
                raise ApiError(
                    500,
                    f"the process that reads large request bodies ended or took longer than {_TIMEOUT_S:.0f} s; send "
                    "a smaller request",
                    code="internal_error",
                ) from None
            if is_large:
                self._end()
                self._started()
        if refusal is not None:
            raise ApiError(**refusal)
        parsed = parse(schema, cleaned, max_context)
        if texts:
            _put_back(parsed, texts)
        return parsed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._channel is None:
            if self._closed:
                raise EOFError
            self._channel, theirs = socket.socketpair()
            self._channel.settimeout(_TIMEOUT_S)
            package = str(Path(__file__).parents[3])
            path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603  this interpreter and our own module
                    [sys.executable, "-P", "-m", __name__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path},
                    # Ctrl-C in a terminal is for the server, which drains first.
                    start_new_session=True,
                )
        return self._channel

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _serve(channel: socket.socket) -> None:
    """Main loop of the worker: reads bodies, writes parsed requests, until the server closes its end."""
    os.nice(_NICENESS)
    while True:
        question, body = _receive(channel, 2)
        module, name, max_context, limits = json.loads(question)
        cleaned = b""
        # Random, so that no request body can contain the mark.
        mark, texts = secrets.token_hex(16), list[bytes]()
        refusal: dict[str, Any] | None = None
        try:
            schema = getattr(importlib.import_module(module), name)
            parsed = parse(schema, body, max_context, limits)
            if _has_more_values(parsed, MAX_VALUES + max_context):
                raise ApiError(400, f"the request holds more than {MAX_VALUES} values; send a smaller one")
            document = parsed.model_dump(mode="json", exclude_unset=True, by_alias=True)
            cleaned = json.dumps(_take_out(document, mark, texts)).encode()
        except ApiError as error:
            refusal = error.arguments()
        is_large = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > _MAX_RSS_BYTES
        for message in (json.dumps([refusal, is_large, mark, len(texts)]).encode(), cleaned, *texts):
            _send(channel, message)
        if is_large:
            return


def _has_more_values(request: BaseModel, limit: int) -> bool:
    num_values = 0
    level: list[Any] = [request]
    while level:
        value = level.pop()
        held: Iterable[Any] = ()
        if isinstance(value, BaseModel):
            held = [*value.__dict__.values(), *(value.__pydantic_extra__ or {}).values()]
        elif isinstance(value, dict):
            held = value.values()
        elif isinstance(value, list | tuple):
            held = value
        before = len(level)
        level.extend(held)
        num_values += len(level) - before
        if num_values > limit:
            return True
    return False


def _take_out(value: Any, mark: str, texts: list[bytes]) -> Any:
    """`value` with each long text replaced by a mark; the texts follow unencoded. Parsing 8 MB of text as JSON takes 30
    ms, decoding it 1 ms."""
    if isinstance(value, str) and len(value) > _LONG_TEXT:
        texts.append(value.encode())
        return f"{mark}{len(texts) - 1}"
    if isinstance(value, dict):
        return {name: _take_out(held, mark, texts) for name, held in value.items()}
    if isinstance(value, list):
        return [_take_out(held, mark, texts) for held in value]
    return value


def _put_back(value: Any, texts: dict[str, str]) -> Any:
    """Replace the marks by their texts."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, BaseModel):
        for members in (value.__dict__, value.__pydantic_extra__ or {}):
            members.update({name: _put_back(held, texts) for name, held in members.items()})
    elif isinstance(value, dict):
        return {name: _put_back(held, texts) for name, held in value.items()}
    elif isinstance(value, list):
        return [_put_back(held, texts) for held in value]
    return value


def _send(channel: socket.socket, message: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(message)))
    channel.sendall(message)


def _receive(channel: socket.socket, num_messages: int) -> list[bytes]:
    return [
        _exactly(channel, _LENGTH.unpack(_exactly(channel, _LENGTH.size))[0]) for _ in range(num_messages)
    ]


def _exactly(channel: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. EOFError when the other end closes earlier."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        num_read = channel.recv_into(view)
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return bytes(data)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=os.dup(0)) as server:
        _serve(server)
