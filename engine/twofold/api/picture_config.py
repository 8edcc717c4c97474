"""Settings of pictures in prompts: the encoder's files, its processor, and how much is kept."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.api.settings import setting

MAX_PICTURE_BYTES: Final = 64 * 1024 * 1024
"""Largest picture file."""
_MEDIA: Final = ("image", "video", "audio")
_DEFAULT_LIMIT: Final = 32


_DEVICE: Final = re.compile(r"cpu|cuda(?::(\d{1,2}))?")


@dataclass(frozen=True)
class PictureConfig:
    """Pictures in prompts: the encoder's files, its processor, and how much is kept.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    mmproj: str | None = setting(
        None,
        "GGUF file with the picture encoder of a GGUF model (default: the mmproj-*.gguf beside it, if there is one)",
    )
    vision_device: str = setting(
        "cpu",
        "where pictures are encoded: cpu, cuda (the first GPU) or cuda:N. A GPU encodes faster; the memory that it "
        "reserves for the encoder is not available to experts (`twofold fit` shows both)",
    )
    load_vision: bool = setting(
        False, "load the picture encoder at the start; off: with the first picture, which then waits for it"
    )
    vision_idle_s: float = setting(
        600.0, "seconds without a picture after which the encoder leaves memory; 0 = never", low=0
    )
    limit_mm_per_prompt: str = setting(
        '{"image": 32}',
        'most pictures of one prompt, a JSON object such as {"image": 4}. {"image": 0} = none: the model reads text '
        "only, and its picture encoder takes no memory",
    )
    mm_processor_kwargs: str | None = setting(
        None,
        "settings of the model's picture processor, a JSON object such as "
        '{"min_pixels": 50176, "max_pixels": 1003520} (default: those of the model)',
    )
    picture_cache_bytes: int = setting(
        512 * 1024 * 1024,
        "memory for encoded pictures, so that a conversation's next turn encodes none again; 0 = none are kept",
        low=0,
    )

    @property
    def takes_pictures(self) -> bool:
        """Whether prompts may have pictures; otherwise no encoder is loaded."""
        return parse_picture_limit(self.limit_mm_per_prompt) > 0


def parse_vision_device(given: str) -> int | None:
    """Number of the GPU that encodes pictures, from `vision_device`; None: the CPU does. Raises ConfigError for a value
    of another form."""
    match = _DEVICE.fullmatch(given)
    if match is None:
        raise ConfigError(f"--vision-device was given {given!r}; it takes cpu, cuda or cuda:N")
    return None if given == "cpu" else int(match[1] or 0)


def parse_picture_limit(given: str) -> int:
    """Most pictures of one prompt, from `limit_mm_per_prompt`. Raises ConfigError for a value of another form."""
    limits = _json_object("limit_mm_per_prompt", given)
    unknown = sorted(limits.keys() - set(_MEDIA))
    limit = limits.get("image", _DEFAULT_LIMIT)
    if unknown or isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigError(
            f'--limit-mm-per-prompt was given {given!r}; it takes a JSON object such as {{"image": 4}}'
        )
    return limit


def parse_processor_settings(given: str | None) -> dict[str, Any]:
    """Settings that replace those of a model's picture processor, from `mm_processor_kwargs`. Raises ConfigError for a
    value of another form."""
    return _json_object("mm_processor_kwargs", given or "{}")


def _json_object(field: str, text: str) -> dict[str, Any]:
    flag = f"--{field.replace('_', '-')}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} was given {text!r}, which is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} was given {text!r}; it takes a JSON object")
    return value
