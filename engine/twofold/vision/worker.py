"""Process that encodes pictures.

Decoders read what strangers send, and transformers takes seconds to import and hundreds of MB: in a process of its own
a damaged picture ends no server, no token waits for Python's lock, and an idle encoder returns all of its memory. The
process exits when the other end of its channel, its standard input, is closed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twofold.api.errors import ConfigError, ModelLoadError, RequestError, TwofoldError

if TYPE_CHECKING:
    from PIL.Image import Image

    from twofold.vision.encoder import PictureEncoder, PreparedPicture

_NICENESS: Final = 10
"""Niceness of the process: pictures yield to tokens."""
_LOW_DETAIL: Final = (512, 512)
"""Largest size of a picture that a request asks to see in low detail, as in OpenAI's API."""
_THUMBNAIL: Final = (128, 128)
ERRORS: Final[Mapping[str, type[TwofoldError]]] = {
    "config": ConfigError, "load": ModelLoadError, "request": RequestError,
}  # fmt: skip


def main() -> None:
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        # Its threads end no time slice of the engine's when they wake: the longest of 7,500 gaps between tokens beside
        # an encoder was 11 ms where it was 16 ms, with as much encoded.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(EOFError, OSError), Connection(os.dup(0)) as channel:
        settings = json.loads(channel.recv_bytes())
        try:
            encoder = _open(settings)
        except TwofoldError as error:
            _refuse(channel, error)
            return
        _send(
            channel,
            {
                "mark": encoder.mark,
                "row_tokens": encoder.tokens.rows,
                "routed_tokens": encoder.tokens.routed,
                "rotates": encoder.rotates,
            },
        )
        while True:
            question = json.loads(channel.recv_bytes())
            answer = _ANSWERS[question["kind"]]
            try:
                header, *arrays = answer(encoder, question, channel.recv_bytes())
            except TwofoldError as error:
                _refuse(channel, error)
                continue
            _send(channel, header)
            for array in arrays:
                channel.send_bytes(np.ascontiguousarray(array).tobytes())


def _open(settings: Mapping[str, Any]) -> PictureEncoder:
    try:
        import torch

        from twofold.vision.loading import open_encoder
    except ImportError as error:
        raise ConfigError(
            f"pictures need the extra `vision` ({error}); install it with pip install 'twofold[vision]'"
        ) from None
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    projector = settings["projector"]
    device = settings["device"]
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--vision-device was given {device}, but PyTorch finds no usable GPU; use cpu")
    encoder = open_encoder(Path(settings["model"]), None if projector is None else Path(projector), device)
    if encoder.hidden_size != settings["hidden_size"]:
        raise ModelLoadError(
            f"{projector or settings['model']}: the picture encoder's rows have {encoder.hidden_size} values, expected "
            f"the model's hidden size {settings['hidden_size']}; use the encoder that belongs to the model"
        )
    return encoder


@dataclass(frozen=True, eq=False)
class _Read:
    """A picture before it is encoded."""

    size: tuple[int, int]
    """Pixels as sent."""
    thumbnail: str
    prepared: PreparedPicture


def _encode(encoder: PictureEncoder, question: Mapping[str, Any], data: bytes) -> list[Any]:
    """The first of the pictures, with as many of the next as are worth encoding together with it."""
    begin_s = time.perf_counter()
    taken: list[_Read] = []
    room = encoder.values_together
    file = io.BytesIO(data)
    for asked in question["pictures"]:
        read = _read(encoder, asked, question["settings"], file.read(asked["num_bytes"]))
        room -= read.prepared.num_values
        if taken and room < 0:
            break
        taken.append(read)
        if room <= 0:
            break
    headers, arrays = [], []
    for read, made in zip(taken, encoder.pictures([each.prepared for each in taken]), strict=True):
        encoded, deep = made.media, made.media.deep
        headers.append(
            {
                "text": made.text,
                "runs": made.runs,
                "digest": encoded.digest.hex(),
                "grid": made.grid,
                "size": read.size,
                "thumbnail": read.thumbnail,
                "rows": encoded.rows.shape,
                "deep": None if deep is None else deep.shape,
            }
        )
        arrays += [encoded.rows, *([] if deep is None else [deep])]
    return [{"pictures": headers, "encode_s": time.perf_counter() - begin_s}, *arrays]


def _read(
    encoder: PictureEncoder, asked: Mapping[str, Any], settings: Mapping[str, Any], data: bytes
) -> _Read:
    from twofold.vision.pictures import read_picture

    picture = read_picture(data, asked["where"])
    size = picture.size
    if asked["low_detail"]:
        picture.thumbnail(_LOW_DETAIL)
    try:
        return _Read(size, _thumbnail(picture), encoder.prepared(picture, settings))
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"{asked['where']}: the model's picture processor refuses the picture of {size[0]} × {size[1]} pixels "
            f"({error})",
            param=asked["where"],
        ) from None


def _thumbnail(picture: Image) -> str:
    file = io.BytesIO()
    small = picture.copy()
    small.thumbnail(_THUMBNAIL)
    small.save(file, "JPEG", quality=70)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _rotate(encoder: PictureEncoder, question: Mapping[str, Any], data: bytes) -> list[Any]:
    rotations = encoder.rotations(np.frombuffer(data, np.int64).copy(), question["grids"])
    return [{"axes": len(rotations)}, rotations]


_ANSWERS: Final = {"encode": _encode, "rotate": _rotate}


def _send(channel: Connection, header: Mapping[str, Any]) -> None:
    channel.send_bytes(json.dumps(header).encode())


def _refuse(channel: Connection, error: TwofoldError) -> None:
    kind = next((name for name, each in ERRORS.items() if isinstance(error, each)), "load")
    _send(channel, {"error": kind, "message": str(error), "param": getattr(error, "param", None)})


if __name__ == "__main__":
    main()
