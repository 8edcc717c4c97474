"""Families described by `Decoder`, by name."""

from __future__ import annotations

from typing import Final

from twofold.models.decoder_family import DecoderFamily
from twofold.models.families.dense import DENSE
from twofold.models.families.grouped_query import GROUPED_QUERY
from twofold.models.families.latent import LATENT
from twofold.models.families.minimax_m3 import MINIMAX_M3
from twofold.models.families.mistral_large4 import MISTRAL_LARGE4
from twofold.models.families.multimodal import MULTIMODAL
from twofold.models.families.qwen4_exp import QWEN4_EXP
from twofold.models.families.recurrent import RECURRENT

_DESCRIBED: Final = (
    DENSE | GROUPED_QUERY | MULTIMODAL | MINIMAX_M3 | LATENT | MISTRAL_LARGE4 | RECURRENT | QWEN4_EXP
)
DECODERS: Final = {name: DecoderFamily(decoder) for name, decoder in _DESCRIBED.items()}
