"""Time of one token in attention of DeepSeek-V3.2's shape, by context: with its indexer, and with full attention.

    python -m benchmarks.indexer [--contexts 4096 32768 131072] [--rounds 9] [--threads 2]

One layer of latent attention without experts, random weights in bf16, over a bf16 cache of random rows. Three cases
take turns on the same weights: full attention; the indexer's own layer, which scans a key per position and attends to
the chosen positions; and a layer that shares the lists of that one. A round is one token of each; medians are printed.
One thread's times are CPU time, which neighbours disturb less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from twofold.blocks import ops
from twofold.blocks.attention.indexer import Indexer
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.block import Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.mla import Mla
from twofold.weights.checkpoint import Checkpoint

MOST: Final = 2048
PAGE: Final = 64
FULL: Final = Mla(
    0,
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    eps=1e-6,
    scores=Scores(192**-0.5),
)
INDEXER: Final = Indexer(
    num_heads=64, head_dim=128, most=MOST, rank=1536, eps=1e-6, rank_eps=1e-6, rotation=Rotation()
)


def opened(directory: Path) -> BlockWeights:
    """Random weights of the layer with its indexer."""
    specs = replace(FULL, select=Chosen(MOST, INDEXER)).tensors(lambda spec: "_b_proj" not in spec.name)
    random = torch.Generator().manual_seed(1)
    tensors = {
        spec.name: (torch.randn(spec.shape, generator=random) * spec.shape[-1] ** -0.5).bfloat16()
        for spec in specs.values()
    }
    save_file(tensors, directory / "model.safetensors")
    return BlockWeights(Checkpoint.open(directory), specs)


def filled(planes: list[tuple[int, int, str]], num_pages: int) -> ops.StateCache:
    """Caches of two layers, of 32 different pages of random rows."""
    cache = ops.StateCache([planes, planes[:1]], num_pages, PAGE)
    random = np.random.default_rng(2)
    size = len(cache.read_page(0)) // 2
    for page in range(num_pages):
        if page < 32:
            bits = random.standard_normal(size).astype(np.float32).view(np.uint32) >> 16
            cache.write_page(page, bits.astype(np.uint16).tobytes())
        else:
            cache.fork_page(page % 32, page)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    pool = ops.ThreadPool(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        weights = opened(Path(directory))
        choosing = replace(FULL, select=Chosen(MOST, INDEXER))
        blocks = [FULL.cpu(weights, pool, 0), choosing.cpu(weights, pool, 0)]
        blocks.append(replace(FULL, layer=1, select=Chosen(MOST)).cpu(weights, pool, 0))
    planes = [(kept.planes, kept.elements, "bfloat16") for kept in choosing.state if isinstance(kept, Pages)]
    num_pages = max(arguments.contexts) // PAGE + 1
    caches = [filled(each, num_pages) for each in (planes[:1], planes)]
    runs = [
        (ops.Decoder(blocks[:1]), caches[0]), (ops.Decoder(blocks[1:2]), caches[1]),
        (ops.Decoder(blocks[1:]), caches[1]),
    ]  # fmt: skip
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    hidden = np.random.default_rng(3).standard_normal((1, FULL.hidden_size)).astype(np.float32)
    tables = np.arange(num_pages, dtype=np.int32)[None]
    print(f"level {ops.isa_choice()[0]}, {arguments.threads} threads, ms of a token in one layer")
    print("| context | full attention | with the indexer | sharing its lists | full / indexer |")
    print("|--:|--:|--:|--:|--:|")
    for context in arguments.contexts:
        times: list[list[float]] = [[], [], []]
        for _ in range(arguments.rounds + 1):
            for taken, (decoder, cache) in zip(times, runs, strict=True):
                angles = np.zeros((1, FULL.qk_rope_head_dim // 2), np.float32)
                batch = ops.AttentionBatch(
                    np.array([context], np.int32), np.zeros(1, np.int32), tables, angles + 1, angles
                )
                rows, began = hidden.copy(), clock()
                decoder.forward(rows, batch, cache)
                taken.append(1e3 * (clock() - began))
        full, own, both = (float(np.median(each[1:])) for each in times)
        print(f"| {context:,} | {full:.1f} | {own:.1f} | {both - own:.1f} | {full / own:.1f} |", flush=True)


if __name__ == "__main__":
    main()
