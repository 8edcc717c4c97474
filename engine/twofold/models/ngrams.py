"""n-gram embeddings of layers, as config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from twofold.blocks.ngram_hash import drawn_hash
from twofold.blocks.ngram_input import NgramInput
from twofold.blocks.ngram_tables import NgramTables
from twofold.models.config_json import num_layers_of
from twofold.weights.json_file import Fields

_MOST: Final = 2**40
"""A number of rows that no file reaches."""


@dataclass(frozen=True)
class Ngrams:
    tables: NgramTables
    blocks: Mapping[int, NgramInput]
    """The block that comes first in each of the layers that have one."""


def read_ngrams(fields: Fields, num_streams: int, eps: float) -> Ngrams | None:
    """None for a model without them. Raises ModelLoadError naming the file and the key."""
    hidden, num_layers = fields.integer("hidden_size"), num_layers_of(fields)
    layers = tuple(sorted({number - 1 for number in fields.integers("ple_layer_ids")}))
    if not layers:
        return None
    if not 0 <= layers[0] <= layers[-1] < num_layers:
        raise fields.error(
            "ple_layer_ids", fields.data["ple_layer_ids"], f"numbers of layers from 1 to {num_layers}"
        )
    # Settings of a GGUF file state it by itself, beside all tokens that end an answer.
    ends = fields.integers(("ple_eos_token_id", "eos_token_id"))
    if not ends:
        raise fields.error("eos_token_id", None, "a token, before which n-grams end")
    ngram_size = fields.integer("ngram_size", 3, minimum=2, maximum=64)
    heads = fields.integer("heads_per_ngram", 8, maximum=1024)
    hashes = tuple(
        drawn_hash(
            table=table,
            ngram_size=ngram_size,
            heads=heads,
            vocab_size=fields.integer("vocab_size"),
            least_rows=fields.integer("ngram_vocab_size_base", 20_000_000, maximum=_MOST),
            seed=fields.integer("seed", 1234, minimum=0, maximum=2**62),
            end_token=ends[0],
        )
        for table in range(len(layers))
    )
    tables = NgramTables(
        layers,
        hashes,
        size=fields.integer("ple_embed_dim", hidden),
        divisor=fields.integer("make_ngram_vocab_size_divisible_by", 128, maximum=_MOST),
        num_shards=fields.integer("split_ngram_parts", 512, maximum=1 << 16),
    )
    taps = fields.integer("ple_conv_kernel_size", 4, maximum=1024)
    return Ngrams(
        tables,
        {
            layer: NgramInput(
                layer, hidden, num_streams, tables.size, tables.first(layer), taps, ngram_size, eps
            )
            for layer in layers
        },
    )
