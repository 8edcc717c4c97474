"""Encodes pictures for an engine's requests, in a process of its own, and keeps what was encoded last."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError, KernelError, ModelLoadError, RequestError
from twofold.api.media import MediaRows
from twofold.vision.encoded import EncodedPicture, PictureTokens, PlacedPrompt, SentPicture, place_pictures

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 600.0
"""Time limit of one answer: a large picture beside running requests takes tens of seconds."""
_MOST_TOGETHER: Final = 8
"""Pictures encoded together at most."""


@dataclass(frozen=True)
class PictureSource:
    """Where a model's picture encoder is, and how it is used."""

    model: Path
    """Model directory or GGUF file."""
    projector: Path | None
    """GGUF file of the encoder; None: it is in the directory."""
    hidden_size: int
    settings: Mapping[str, Any]
    """Settings that replace those of the model's processor."""
    device: str
    """cpu, cuda or cuda:N."""
    threads: int
    """0: as many as torch takes."""
    cache_bytes: int
    idle_s: float
    """Seconds without a picture after which the process ends; 0: it does not."""


@dataclass(frozen=True)
class PictureStats:
    """Counts of a picture service."""

    queries: int = 0
    """Pictures looked up in the cache."""
    hits: int = 0
    encode_s: float = 0.0
    cached_bytes: int = 0
    is_loaded: bool = False


class PictureService:
    """Thread-safe; every method blocks. The process starts with the first picture and ends when it is idle."""

    def __init__(self, source: PictureSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._cache = _PictureCache(source.cache_bytes)
        self._stats = PictureStats()
        self._worker: _Worker | None = None
        self._idle: threading.Timer | None = None
        self._closed = False

    def stats(self) -> PictureStats:
        """Counts since the start. Does not block."""
        return dataclasses.replace(
            self._stats, cached_bytes=self._cache.num_bytes, is_loaded=self._worker is not None
        )

    def load(self) -> None:
        """Start the process. Raises ConfigError if a package is missing, ModelLoadError for files that cannot be
        used."""
        with self._lock:
            self._started()

    def encode(self, sent: Sequence[SentPicture]) -> list[EncodedPicture]:
        """The rows of one request's pictures. Small ones are encoded together.

        Raises:
            RequestError: a picture is damaged, too large, or of an unknown format.
            ConfigError, ModelLoadError: as `load`. KernelError: the process ended.
        """
        made: list[EncodedPicture] = []
        while len(made) < len(sent):
            with self._lock:
                made += self._next(sent[len(made) : len(made) + _MOST_TOGETHER])
        return made

    def _next(self, sent: Sequence[SentPicture]) -> list[EncodedPicture]:
        """The rows of the first of these pictures and perhaps of some more."""
        stats = self._stats
        if (found := self._cache.get(sent[0].key)) is not None:
            self._stats = dataclasses.replace(stats, queries=stats.queries + 1, hits=stats.hits + 1)
            return [found]
        new: dict[bytes, SentPicture] = {}
        for each in sent:
            if each.key in new or each.key in self._cache:
                break
            new[each.key] = each
        question = {
            "kind": "encode",
            "pictures": [
                {"where": each.where, "low_detail": each.low_detail, "num_bytes": len(each.data)}
                for each in new.values()
            ],
            "settings": dict(self.source.settings),
        }
        answer, worker = self._ask(question, b"".join(each.data for each in new.values()))
        made = [self._received(worker, header) for header in answer["pictures"]]
        for key, picture in zip(new, made, strict=False):
            self._cache.put(key, picture)
        self._stats = dataclasses.replace(
            stats, queries=stats.queries + len(made), encode_s=stats.encode_s + answer["encode_s"]
        )
        return made

    def _received(self, worker: _Worker, header: Mapping[str, Any]) -> EncodedPicture:
        rows, deep = (self._array(worker, header[name], np.float32) for name in ("rows", "deep"))
        assert rows is not None
        digest = bytes.fromhex(header["digest"])
        return EncodedPicture(
            header["text"],
            tuple(header["runs"]),
            MediaRows(rows, digest, math.prod(header["size"]), header["thumbnail"], deep),
            None if header["grid"] is None else tuple(header["grid"]),
        )

    def mark(self) -> str:
        """Text that stands for a picture in what the model's chat template writes. Raises as `load`."""
        with self._lock:
            return self._started().mark

    def placed(self, token_ids: Sequence[int], pictures: Sequence[EncodedPicture]) -> PlacedPrompt:
        """The prompt with the pictures' rows, given one in which `EncodedPicture.text` stands for each, in order.

        Raises:
            ValueError: the prompt has more or fewer tokens for pictures than expected.
            KernelError: the process ended.
        """
        with self._lock:
            worker = self._started()
            return place_pictures(
                token_ids, pictures, worker.tokens, self._rotations if worker.rotates else None
            )

    def _rotations(self, token_ids: I64, grids: Sequence[tuple[int, ...] | None]) -> I32:
        header, worker = self._ask({"kind": "rotate", "grids": grids}, token_ids.tobytes())
        found: I32 = self._array(worker, (header["axes"], len(token_ids)), np.int32)
        return found

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, question: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], _Worker]:
        worker = self._started()
        try:
            worker.channel.send_bytes(json.dumps(question).encode())
            worker.channel.send_bytes(data)
            return _header(worker.channel), worker
        except (OSError, EOFError):
            self._lost()

    def _array(self, worker: _Worker, shape: Sequence[int] | None, dtype: type[np.generic]) -> Any:
        if shape is None:
            return None
        try:
            return np.frombuffer(worker.channel.recv_bytes(), dtype).reshape(shape)
        except (OSError, EOFError):
            self._lost()

    def _started(self) -> _Worker:
        """The running process, started if there is none. Restarts the idle timer."""
        if self._closed:
            raise KernelError("the engine was closed; pictures cannot be encoded any more")
        if self._worker is None:
            self._worker = _Worker(self.source)
        if self._idle is not None:
            self._idle.cancel()
        if self.source.idle_s:
            self._idle = threading.Timer(self.source.idle_s, self._end_idle)
            self._idle.daemon = True
            self._idle.start()
        return self._worker

    def _end_idle(self) -> None:
        timer = threading.current_thread()
        with self._lock:
            if self._idle is timer:
                _log.info("the picture encoder was idle for %.0f s and leaves memory", self.source.idle_s)
                self._end()

    def _lost(self) -> NoReturn:
        self._end()
        raise KernelError(
            f"the process that encodes pictures ended, or took longer than {_TIMEOUT_S:.0f} s; its log is on standard "
            "error. Send a smaller picture, or --mm-processor-kwargs with fewer pixels"
        )

    def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """A process that runs `vision.worker`."""

    def __init__(self, source: PictureSource) -> None:
        """Start it and wait for its model. Raises as `PictureService.load`."""
        ours, theirs = socket.socketpair()
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "twofold.vision.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                # Ctrl-C in a terminal is for the server, which drains first.
                start_new_session=True,
            )
        self.channel = Connection(ours.detach())
        settings = {
            "model": str(source.model),
            "projector": None if source.projector is None else str(source.projector),
            "hidden_size": source.hidden_size,
            "threads": source.threads,
            "device": source.device,
        }
        try:
            self.channel.send_bytes(json.dumps(settings).encode())
            header = _header(self.channel)
        except (OSError, EOFError):
            self.close()
            raise KernelError(
                "the process that encodes pictures ended while it loaded the encoder; its log is on standard error"
            ) from None
        except BaseException:
            self.close()
            raise
        self.mark: str = header["mark"]
        self.tokens = PictureTokens(tuple(header["row_tokens"]), tuple(header["routed_tokens"]))
        self.rotates: bool = header["rotates"]

    def close(self) -> None:
        self.channel.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class _PictureCache:
    """LRU cache of encoded pictures by the digest of their file, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[bytes, EncodedPicture] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes) -> EncodedPicture | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: bytes, picture: EncodedPicture) -> None:
        self._kept[key] = picture
        self.num_bytes += picture.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes


def _header(channel: Connection) -> dict[str, Any]:
    """The next answer of the process. EOFError when it ended or takes too long; its errors are raised here."""
    if not channel.poll(_TIMEOUT_S):
        raise EOFError
    header: dict[str, Any] = json.loads(channel.recv_bytes())
    match header.get("error"):
        case None:
            return header
        case "request":
            raise RequestError(header["message"], param=header["param"])
        case "config":
            raise ConfigError(header["message"])
        case _:
            raise ModelLoadError(header["message"])
