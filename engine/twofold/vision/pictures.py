"""Bytes of a picture → RGB, within bounds: strangers send them."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Final

from twofold.api.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS: Final = 64 * 1024 * 1024
"""Pixels of a picture as sent: 200 MB once it is RGB."""
MAX_SIDE: Final = 32_768
_BACKGROUND: Final = (255, 255, 255)
"""Colour behind transparent pixels: that of a page, where screenshots of text are readable."""


def read_picture(data: bytes, where: str) -> Image:
    """The first frame of an encoded picture as an upright RGB image; transparent pixels lie on white.

    where: the field that holds it, for errors.

    Raises:
        RequestError: the data is damaged, too large, or of another format.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.UnidentifiedImageError:
        raise _wrong(
            where, f"these {len(data):,} bytes are no picture; expected {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # decoders raise errors of many kinds for damaged headers
        raise _wrong(where, f"the picture cannot be read ({_message(error)})") from None
    width, height = picture.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise _wrong(
            where,
            f"the picture has {width:,} × {height:,} pixels; at most {MAX_PIXELS:,} in all and {MAX_SIDE:,} on a side "
            "were expected. Send a smaller one",
        )
    try:
        picture.load()
        return _opaque(PIL.ImageOps.exif_transpose(picture))
    except MemoryError:
        raise
    except Exception as error:
        raise _wrong(where, f"the picture is damaged ({_message(error)})") from None


def _opaque(picture: Image) -> Image:
    import PIL.Image

    if picture.mode.startswith("I"):  # 16 bits or more: Pillow would clip
        picture = picture.convert("I").point(lambda value: value / 256).convert("L")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        under = PIL.Image.new("RGBA", layer.size, (*_BACKGROUND, 255))
        return PIL.Image.alpha_composite(under, layer).convert("RGB")
    return picture.convert("RGB")


def _message(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:200]


def _wrong(where: str, problem: str) -> RequestError:
    return RequestError(f"{where}: {problem}", param=where)
