"""n-gram embeddings of layers against transformers' module, with drawn odd settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding, Qwen4ExpTextPLELayer
from twofold.api.errors import KernelError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import in_layer
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.ngram_hash import drawn_hash, ngram_ids
from twofold.blocks.ngram_input import NgramInput
from twofold.blocks.ngram_tables import NgramTables
from twofold.blocks.table_inputs import HostInputs
from twofold.weights.checkpoint import Checkpoint

F32 = npt.NDArray[np.float32]
VOCABULARY, LAYERS, RECORDS = 20, (0, 2), 8
LONG = 24


def drawn(seed: int) -> Qwen4ExpTextConfig:
    r = random.Random(seed)
    tokens, heads = r.choice((2, 3, 4)), r.choice((1, 2, 3))
    return Qwen4ExpTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=r.choice((8, 24, 33)),
        num_hidden_layers=4,
        num_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention"] * 4,
        hc_count=r.choice((2, 3, 4)),
        ple_layer_ids=[layer + 1 for layer in LAYERS],
        ple_embed_dim=(tokens - 1) * heads * r.choice((4, 6, 32)),
        ple_conv_kernel_size=r.choice((1, 2, 4)),
        ngram_size=tokens,
        heads_per_ngram=heads,
        ngram_vocab_size_base=r.choice((2, 11, 50)),
        make_ngram_vocab_size_divisible_by=r.choice((1, 16)),
        seed=r.choice((0, 1234, 10**12)),
        split_ngram_parts=r.choice((1, 3, 7)),
        eos_token_id=r.choice((3, [5, 3])),
        rms_norm_eps=r.choice((1e-6, 1e-3)),
    )


@dataclass
class Reference:
    config: Qwen4ExpTextConfig
    layers: list[Qwen4ExpTextPLELayer]

    @classmethod
    def of(cls, config: Qwen4ExpTextConfig) -> Reference:
        torch.manual_seed(0)
        layers = [Qwen4ExpTextPLELayer(config, layer, number) for number, layer in enumerate(LAYERS)]
        for each in layers:
            for parameter in each.parameters():
                parameter.data.normal_(0, 0.5)
        return cls(config, layers)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Tensors of a checkpoint as transformers writes it."""
        found: dict[str, npt.NDArray[Any]] = {}
        for layer, module in zip(LAYERS, self.layers, strict=True):
            state = {f"model.layers.{layer}.ple.{name}": value for name, value in module.state_dict().items()}
            name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
            table = state.pop(f"{name}.weight")
            for number, part in enumerate(torch.chunk(table, self.config.split_ngram_parts)):
                of_part = "" if self.config.split_ngram_parts == 1 else f".shard_{number}"
                state[f"{name}{of_part}.weight"] = part
            found |= {name: value.numpy() for name, value in state.items()}
        return found

    def forward(self, tokens: Sequence[int], hidden: F32) -> F32:
        """Mean of the streams, which begin as `hidden`."""
        ids, count = torch.tensor([tokens]), self.config.hc_count
        streams = torch.from_numpy(hidden)[None].repeat(1, 1, count)
        with torch.no_grad():
            for module in self.layers:
                streams = streams + module(streams, ids, None)
        mean: F32 = streams.view(len(tokens), count, -1).mean(1).numpy()
        return mean


@dataclass
class Part:
    """Consecutive tokens of a sequence in a step."""

    tokens: Sequence[int]
    hidden: F32
    begin: int
    end: int
    record: int
    kept: Sequence[int] = ()


class Ours:
    def __init__(self, config: Qwen4ExpTextConfig, directory: Path, cache_bytes: int = 1 << 20) -> None:
        end = config.eos_token_id
        self.tables = NgramTables(
            LAYERS,
            tuple(
                drawn_hash(
                    table=table,
                    ngram_size=config.ngram_size,
                    heads=config.heads_per_ngram,
                    vocab_size=VOCABULARY,
                    least_rows=config.ngram_vocab_size_base,
                    seed=config.seed,
                    end_token=end[0] if isinstance(end, list) else end,
                )
                for table in range(len(LAYERS))
            ),
            size=config.ple_embed_dim,
            divisor=config.make_ngram_vocab_size_divisible_by,
            num_shards=config.split_ngram_parts,
            cache_bytes=cache_bytes,
        )
        source = Checkpoint.open(directory)
        self.pool = ops.ThreadPool(2)
        weights = BlockWeights(source, self.tables.tensors(lambda spec: spec.name in source))
        weights.check()
        self.tables.check(weights)
        self.inputs: HostInputs = self.tables.cpu(weights, self.pool)
        kernels = []
        records = [0] * 3
        for layer in LAYERS:
            ple = NgramInput(
                0,
                config.hidden_size,
                config.hc_count,
                config.ple_embed_dim,
                self.tables.first(layer),
                config.ple_conv_kernel_size,
                config.ngram_size,
                config.rms_norm_eps,
            )
            _, placed = in_layer((ple, ple), layer)  # after another record of the layer
            of_block = BlockWeights(source, placed.tensors(lambda spec: True))
            of_block.check()
            kernels.append(placed.cpu(of_block, self.pool, 0))
            records[layer] = 2 * placed.state[0].num_bytes
        self.decoder = ops.Decoder(kernels)
        self.cache = ops.StateCache([[(1, 8, "float32")], [], []], 1, 64, records, RECORDS)

    def step(self, *parts: Part) -> list[F32]:
        lengths = [part.end - part.begin for part in parts]
        index = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)
        positions = np.concatenate([np.arange(part.begin, part.end, dtype=np.int32) for part in parts])
        rotation = np.zeros((len(index), 1), np.float32)
        records = np.array([part.record for part in parts], np.int32)
        pages = np.zeros((len(parts), 1), np.int32)
        batch = ops.AttentionBatch(positions, index, pages, rotation, rotation, records)
        if any(part.kept for part in parts):
            batch.keep_records(np.array([number for part in parts for number in part.kept], np.int32))
        ids = [ngram_ids(part.tokens[: part.end], part.begin, self.tables.num_ids) for part in parts]
        hidden = np.concatenate([part.hidden[part.begin : part.end] for part in parts])
        inputs = np.full((len(index), self.tables.width), np.nan, np.float32)
        self.inputs.read_ahead(np.concatenate(ids))
        self.inputs.forward(np.concatenate(ids), hidden, inputs)
        self.decoder.forward(hidden, batch, self.cache, None, layer_inputs=inputs)
        return np.split(hidden, np.cumsum(lengths)[:-1])

    def whole(self, tokens: Sequence[int], hidden: F32, chunk: int, record: int = 0) -> F32:
        return np.concatenate(
            [
                self.step(Part(tokens, hidden, at, min(at + chunk, len(tokens)), record))[0]
                for at in range(0, len(tokens), chunk)
            ]
        )


def prompt(config: Qwen4ExpTextConfig, seed: int, length: int = LONG) -> tuple[list[int], F32]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 8, length)  # ends are among them
    return tokens.tolist(), rng.standard_normal((length, config.hidden_size), np.float32)


def written(config: Qwen4ExpTextConfig, directory: Path) -> Reference:
    made = Reference.of(config)
    save_file(made.tensors(), directory / "model.safetensors")
    return made


@pytest.mark.parametrize("seed", range(8))
def test_drawn_settings_compute_what_transformers_does(seed: int, tmp_path: Path) -> None:
    config = drawn(seed)
    expected, ours = (
        written(config, tmp_path),
        Ours(config, tmp_path, cache_bytes=(0, 300, 1 << 20)[seed % 3]),
    )
    tokens, hidden = prompt(config, seed)
    whole = ours.whole(tokens, hidden, LONG)
    np.testing.assert_allclose(whole, expected.forward(tokens, hidden), rtol=1e-5, atol=1e-5)
    for chunk in (1, 3, 7):
        np.testing.assert_array_equal(ours.whole(tokens, hidden, chunk, record=1), whole)


def test_sequences_of_a_batch_and_rejected_drafts_leave_no_trace(tmp_path: Path) -> None:
    config = drawn(3)
    written(config, tmp_path)
    ours = Ours(config, tmp_path)
    (tokens, hidden), (others, of_others) = prompt(config, 1), prompt(config, 2)
    expected, expected_others = ours.whole(tokens, hidden, LONG), ours.whole(others, of_others, LONG)
    wrong = [*tokens[:12], *others[12:]]
    first = ours.step(Part(tokens, hidden, 0, 10, 2), Part(others, of_others, 0, 5, 3))
    drafted = ours.step(
        Part(others, of_others, 5, LONG, 3, [-1] * (LONG - 5)),
        Part(wrong, hidden, 10, 15, 2, [4, 5, 6, 7, -1]),  # two tokens are accepted: record 5
    )
    rest = ours.step(Part(tokens, hidden, 12, LONG, 5))
    got = np.concatenate([first[0], drafted[1][:2], rest[0]])
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.concatenate([first[1], drafted[0]]), expected_others)


def test_published_sizes_hash_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of 20,000,000 rows a head: no table is made."""
    monkeypatch.setattr(torch.nn, "Embedding", lambda rows, columns: torch.nn.Module())
    config = Qwen4ExpTextConfig(
        vocab_size=248_320, eos_token_id=248_044, num_hidden_layers=4, ple_layer_ids=[1, 3]
    )
    module = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 2, 1)
    module.ngram_embedding.weight = torch.zeros(1)
    module.ngram_embedding.forward = lambda rows: rows
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 50)
    tokens[[7, 20, 21]] = config.eos_token_id
    expected = module(torch.from_numpy(tokens)[None], None)[0].view(50, -1).numpy()
    ours = drawn_hash(
        table=1,
        ngram_size=3,
        heads=8,
        vocab_size=248_320,
        least_rows=20_000_000,
        seed=1234,
        end_token=248_044,
    )
    np.testing.assert_array_equal(ours.rows(ngram_ids(tokens, 0, 3)), expected)
    np.testing.assert_array_equal(ours.rows(ngram_ids(tokens[5:], 17, 3)), expected[22:])


def test_hashes_of_another_configuration_are_refused(tmp_path: Path) -> None:
    config = drawn(0)
    written(config, tmp_path)
    config.seed += 1
    with pytest.raises(
        ModelLoadError, match=r"layer_multipliers has other values than vocab_size.* and seed give"
    ):
        Ours(config, tmp_path)


def test_a_damaged_row_is_an_error_of_the_step_that_reads_it(tmp_path: Path) -> None:
    config = drawn(1)
    tensors = Reference.of(config).tensors()
    for name, values in tensors.items():
        if "ngram_embedding" in name:
            values[:, 0] = np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    ours = Ours(config, tmp_path)
    with pytest.raises(
        KernelError, match=r"row [0-9]+ of a table holds a NaN or an infinity; the file is damaged"
    ):
        ours.whole(*prompt(config, 0), LONG)
