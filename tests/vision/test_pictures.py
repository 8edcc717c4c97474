"""Bytes of pictures: every kind that clients send, and every damage."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from twofold.api.errors import RequestError
from twofold.vision import pictures
from twofold.vision.pictures import read_picture

from tests.tiny_models.pictures import picture


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def values(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image, np.int16)


SHOWN = picture(31, 20)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("JPEG", {"quality": 95, "subsampling": 0}),
    ],
)
def test_formats(kind: str, options: dict[str, Any]) -> None:
    read = values(read_picture(encoded(SHOWN, kind, **options), "image_url"))
    assert read.shape == (20, 31, 3)
    assert np.abs(read - values(SHOWN)).mean() < {"JPEG": 12, "GIF": 40}.get(kind, 0.1)


def test_modes() -> None:
    grey = SHOWN.convert("L")
    expected = values(grey.convert("RGB"))
    wide = Image.fromarray(np.asarray(grey, np.uint16) * 257)
    for image, allowed in ((grey, 0), (wide, 1), (grey.convert("LA"), 0), (grey.convert("1"), 255)):
        read = values(read_picture(encoded(image, "PNG"), "f"))
        assert np.abs(read - expected).max() <= allowed, image.mode
    colours = SHOWN.convert("P", palette=Image.Palette.ADAPTIVE)
    assert np.abs(values(read_picture(encoded(colours, "PNG"), "f")) - values(SHOWN)).mean() < 12
    printed = SHOWN.convert("CMYK")
    assert np.abs(values(read_picture(encoded(printed, "JPEG", quality=95), "f")) - values(SHOWN)).mean() < 14


def test_transparent_pixels_are_white() -> None:
    black = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    black.putpixel((1, 2), (10, 20, 30, 255))
    read = values(read_picture(encoded(black, "PNG"), "f"))
    assert read[2, 1].tolist() == [10, 20, 30]
    read[2, 1] = 255
    assert (read == 255).all()
    indexed = Image.new("P", (2, 2))
    indexed.putpalette([0, 0, 0, 200, 0, 0])
    indexed.putpixel((1, 1), 1)
    read = values(read_picture(encoded(indexed, "PNG", transparency=0), "f"))
    assert read[0, 0].tolist() == [255, 255, 255]
    assert read[1, 1].tolist() == [200, 0, 0]


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the right
    read = read_picture(encoded(SHOWN, "PNG", exif=exif.tobytes()), "f")
    assert read.size == (20, 31)
    np.testing.assert_array_equal(values(read), np.rot90(values(SHOWN), -1))


def test_the_first_frame_counts() -> None:
    frames = encoded(SHOWN, "GIF", save_all=True, append_images=[Image.new("RGB", SHOWN.size)])
    assert values(read_picture(frames, "f")).mean() > 60


def test_one_pixel_is_a_picture() -> None:
    assert read_picture(encoded(SHOWN.crop((0, 0, 1, 1)), "PNG"), "f").size == (1, 1)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no picture"),
        (b"%PDF-1.7 not a picture", "no picture"),
        (encoded(SHOWN, "TIFF"), "no picture"),
        (png(60_000, 60_000, zlib.compress(b"\0" * 1000)), "pixels|bomb"),
        (png(1_000_000, 2, zlib.compress(b"\0" * 1000)), "pixels"),
        (png(9_000, 8_000, zlib.compress(b"\0" * 1000)), "72|pixels"),
        (encoded(SHOWN, "PNG")[:-40], "damaged|cannot be read"),
        (encoded(SHOWN, "JPEG")[:200], "damaged|cannot be read"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_field(data: bytes, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        read_picture(data, "messages[0].content")
    assert caught.value.param == "messages[0].content"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_pictures_are_read_or_refused(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 1 << 20)
    rng = random.Random(count)
    whole = [
        encoded(SHOWN, "PNG"),
        encoded(SHOWN.convert("P"), "PNG"),
        encoded(SHOWN, "JPEG"),
        encoded(SHOWN, "GIF"),
        encoded(SHOWN, "WEBP"),
        encoded(SHOWN, "BMP"),
        encoded(SHOWN, "JPEG", progressive=True),
    ]
    num_read = 0
    for _ in range(count):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        try:
            read = read_picture(bytes(data), "f")
        except RequestError:
            continue
        num_read += 1
        assert read.mode == "RGB"
    assert 0.05 * count < num_read < 0.95 * count
