"""Expert kernels that are measured alone. A list, which needs neither torch nor a build."""

from __future__ import annotations

from typing import Final, Literal

QWEN: Final = "qwen3-30b-a3b"
GPT_OSS: Final = "gpt-oss-20b"
Kind = Literal["decode", "prefill"]
Case = tuple[Kind, str, str, int]
"""Kind, shape, format, tokens."""


def expert_cases() -> list[Case]:
    """The expert kernels that `make bench-gpu` times alone."""
    decode: list[Case] = [
        ("decode", shape, format, tokens)
        for shape, formats in (
            (QWEN, ("bf16", "q8_0", "q4_k", "mxfp4", "q4_0", "fp8")),
            (GPT_OSS, ("bf16", "mxfp4")),
        )
        for format in formats
        for tokens in (1, 8, 32)
    ]
    return decode + [
        ("prefill", QWEN, format, tokens) for format in ("bf16", "q8_0") for tokens in (512, 4096)
    ]
