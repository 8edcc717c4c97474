"""Mistakes planted into the kernels one at a time: the SIMT machine's cases must catch every one of them.

Each is built from a copy of `kernels/cuda` with one text changed; only the source that shows it is compiled again.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.simt.rebuild import KERNELS, PROGRAM, cases, compile_kernels, link


@dataclass(frozen=True)
class Fault:
    name: str
    source: str
    """Source file that is compiled."""
    right: str
    wrong: str
    says: str
    """Pattern of the expected error message."""
    file: str = ""
    """File that contains the text, if not `source`."""


VALUES = r"_cases\.cpp:|instead of"
"""A case found wrong values."""
SYNC = "__syncthreads();\n"
FAULTS = (
    Fault("route: groups' scores are read before all are there", "route_rope.cu",
          "  __syncwarp();\n  for (int g = lane; g < shape.num_groups; g += kWarpSize) {\n    int better",
          "  for (int g = lane; g < shape.num_groups; g += kWarpSize) {\n    int better", "race|not initialised"),
    Fault("route: one token too many", "route_rope.cu", "if (token >= num_tokens) return;",
          "if (token > num_tokens) return;", "behind|outside|bounds"),
    Fault("route: the bias chosen by is also the weight", "route_rope.cu",
          "choice[e] = scores[e] + (bias", "choice[e] = scores[e] = scores[e] + (bias", VALUES),
    Fault("route: a chosen expert stays in the running", "route_rope.cu",
          "if (lane == at % kWarpSize) choice[at] = -INFINITY;", "", VALUES),
    Fault("rotation: turned the other way", "route_rope.cu", "x[j] * cos - partner * sin",
          "x[j] * cos + partner * sin", VALUES),
    Fault("KV store: a row of padding is written", "route_rope.cu", "    if (place < 0) return;\n", "",
          "behind|before|outside|bounds"),
    Fault("attention: scores are read before all are there", "decode_attention.cu",
          "        if (lane == 0) scores[g][i] = sum;\n      }\n    }\n    __syncthreads();\n",
          "        if (lane == 0) scores[g][i] = sum;\n      }\n    }\n", "race|not initialised"),
    Fault("attention: the largest is replaced while others read it", "decode_attention.cu",
          "      __syncwarp();  // all lanes have read largest[g]; shuffles order no memory\n", "", "race"),
    Fault("attention: sums do not fade", "decode_attention.cu", "values[g] *= fade[g]", "values[g] *= 1.0f", VALUES),
    Fault("attention: the page of the first position for all", "decode_attention.cu",
          "table[position / pages.page_size]", "table[0]", VALUES),
    Fault("attention: the last split is left out", "decode_attention.cu",
          "float value = 0;\n  for (int s = 0; s < num_splits(length); ++s)",
          "float value = 0;\n  for (int s = 0; s + 1 < num_splits(length); ++s)", VALUES),
    Fault("latent attention: weights are summed before all are there", "mla_attention.cu",
          "    mla_weigh(tile, thread, count);\n    __syncthreads();\n", "    mla_weigh(tile, thread, count);\n",
          "race"),
    Fault("latent attention: stale page", "mla_attention.cu", "int64_t(table[position / pages.page_size])",
          "int64_t(table[first / pages.page_size])", VALUES),
    Fault("indexer: keys are scored before all are there", "indexer.cu",
          "first, count, keys);\n  __syncthreads();\n", "first, count, keys);\n",
          "race|not initialised"),
    Fault("indexer: the mean stays in the keys", "indexer.cu", "(widened(key, i) - of.mean) * of.inverse",
          "widened(key, i) * of.inverse", VALUES),
    Fault("indexer: keys of a block are replaced while others read them", "indexer.cu",
          "      __syncwarp();\n    }\n    __syncthreads();\n", "      __syncwarp();\n    }\n", "race"),
    Fault("indexer: a shorter last block counts as a whole one", "indexer.cu",
          "choice.most - (kept ? begin + block - length : 0)", "choice.most", VALUES),
    Fault("indexer: positions after the last whole pool are left out", "indexer.cu",
          "after = length % block;", "after = 0;", VALUES),
    Fault("indexer: a pool is scored by its first key", "indexer.cu", "(number + 1) * choice.block - 1 : number",
          "number * choice.block : number", VALUES),
    Fault("indexer: a pool's key is replaced while others read it", "indexer.cu",
          "  __syncwarp();  // from here on the last position's key may be replaced\n", "", "race|not initialised"),
    Fault("indexer: pools of a prompt have the pages of another sequence", "indexer.cu",
          "pools.sequences != nullptr ? pools.sequences[token] : token", "0", VALUES + "|race"),
    Fault("indexer: negative products count", "indexer.cu", "fmaxf(products[h], 0.0f)", "products[h]", VALUES),
    Fault("indexer: of equal scores the first are left out", "indexer.cu", "own_equals < state.equals",
          "own_equals >= state.equals", VALUES + "|behind|outside|bounds|not initialised|race"),
    Fault("indexer: bins are counted without an atomic", "indexer.cu",
          "atomicAdd(&state.bins[score >> shift & (kBins - 1)], 1u);",
          "state.bins[score >> shift & (kBins - 1)] += 1u;", "race"),
    Fault("indexer: a row of padding is written", "indexer.cu", "  if (slot < 0) return;\n", "",
          "behind|before|outside|bounds"),
    Fault("delta net: a lost step's token is carried twice", "gated_delta.cu",
          "*before.position() == int(begin) - 1", "*before.position() <= int(begin)", VALUES),
    Fault("delta net: a draft's state goes to its sequence's record", "gated_delta.cu",
          "kChained ? rows.records[at.sequence + t] : at.record", "at.record", VALUES),
    Fault("delta net: products are read before all are there", "gated_delta.cu",
          "    shared.asked[slice][column] = asked;\n    __syncthreads();\n",
          "    shared.asked[slice][column] = asked;\n", "race|not initialised"),
    Fault("delta net: a new sequence finds the state of another", "gated_delta.cu", "row >= K || begin == 0",
          "row >= K", VALUES),
    Fault("place: slot 0 is taken for none", "step_control.cu", "slots[e] >= 0 ? kHit", "slots[e] > 0 ? kHit",
          VALUES),
    Fault("place: groups begin behind their pairs", "step_control.cu", "pairs + pairs_before - mine",
          "pairs + pairs_before", VALUES + "|behind|outside|bounds"),
    Fault("place: misses are counted without an atomic", "step_control.cu", "atomicAdd(&on_cpu, mine);",
          "on_cpu += mine;", "race"),
    Fault("place: posted before the activations are there", "step_control.cu",
          "  __syncthreads();\n  if (threadIdx.x != 0) return;\n", "  if (threadIdx.x != 0) return;\n",
          "race|order|post"),
    Fault("place: posted by a plain store", "step_control.cu", "store_release(&post->posted, *step);",
          "post->posted = *step;", "plain (write|read)"),
    Fault("wait: the answer is looked at without acquiring it", "step_control.cu",
          "load_acquire(&answer->answered) != wanted", "answer->answered != wanted", "plain (write|read)"),
    Fault("combine: the token's weight instead of the pair's", "expert_layer.cu", "fused(layer.weights[pair]",
          "fused(layer.weights[token]", VALUES),
    Fault("combine: launched with more threads than its bounds", "expert_layer.cu",
          "__launch_bounds__(kCombineThreads)", "__launch_bounds__(kCombineThreads / 2)", "of its launch bounds"),
    Fault("encode: columns behind the row are read", "expert_layer.cu", "at < columns ? ", "at < P ? ",
          VALUES + "|behind|outside|bounds|not initialised"),
    Fault("decode: activations are read before all are there", "expert_decode_float.cu",
          "top_k, shared);\n    __syncthreads();\n", "top_k, shared);\n", "race|not initialised",
          "expert_decode.cuh"),
    Fault("decode: gate and up are swapped", "expert_decode_float.cu",
          "float gate = total<kTokens>(sums, 0, t, lane) + gate_bias;",
          "float gate = total<kTokens>(sums, kWarpsOfMatrix, t, lane) + gate_bias;",
          VALUES, "expert_decode.cuh"),
    Fault("decode: no zeros after the last column", "expert_decode_float.cu", "if (item.panel == panels - 1)",
          "if (item.panel == panels)", "not initialised|" + VALUES, "expert_decode.cuh"),
    Fault("decode: scales of two runs are swapped", "expert_decode_k.cu",
          "Format::template scale<Lane>(block, subblock, half, quad)",
          "Format::template scale<Lane>(block, subblock ^ 1, half, quad)",
          VALUES + "|outside|behind", "panel_products.h"),
    Fault("prefill: a stage is read while it is copied", "expert_prefill_float.cu",
          "wait_copies<Tile::kStages - 2>();",
          "wait_copies<Tile::kStages - 1>();", "flight|wait|race|not initialised", "expert_prefill.cuh"),
    Fault("prefill: a stage is overwritten while others read it", "expert_prefill_float.cu",
          "wait_copies<Tile::kStages - 2>();\n    __syncthreads();\n", "wait_copies<Tile::kStages - 2>();\n",
          "race|flight|not initialised", "expert_prefill.cuh"),
    Fault("prefill: a tile takes a token of the next group", "expert_prefill_float.cu",
          "min(kTileTokens, groups.begin[tile.x + 1] - begin);",
          "min(kTileTokens, groups.begin[tile.x + 1] - begin + 1);",
          "race|outside|behind|bounds|" + VALUES, "expert_prefill.cuh"),
    Fault("prefill: one row too many is written", "expert_prefill_float.cu", "if (row < matrix.rows)",
          "if (row <= matrix.rows)", "race|behind|outside|bounds|" + VALUES, "expert_prefill.cuh"),
    Fault("adapters: a row for a token", "low_rank.cu", "rows.adapters[row / rows.per_token]", "rows.adapters[row]",
          VALUES + "|behind|outside|bounds"),
    Fault("adapters: one rank too many", "low_rank.cu", "if (rank >= own.rank) return;",
          "if (rank > own.rank) return;", "behind|outside|bounds"),
    Fault("adapters: experts of the CPU are changed", "low_rank.cu",
          "(rows.where[row] != kCpu && rows.where[row] != kPadding)", "rows.where[row] != kPadding", VALUES),
    Fault("adapters: rows without one keep what lay there", "low_rank.cu",
          "if (own == nullptr && output.adds) return;", "if (own == nullptr) return;", VALUES),
    Fault("decode: gate's part of an adapter is up's", "expert_decode_float.cu", "up += parts[layout.intermediate];",
          "up += parts[0];", VALUES, "expert_decode.cuh"),
    Fault("prefill: adapters' part of up is left out", "expert_prefill.cu", "up += adapted[own + intermediate];", "",
          VALUES),
    Fault("prefill: adapters of down find no h", "expert_prefill.cu", "if (adapted != nullptr) adapted[own] = h;", "",
          VALUES),
    Fault("prefill: pairs of another launch are gated again", "expert_prefill.cu",
          "const int64_t pair = groups.pairs[place], own", "const int64_t pair = place, own",
          VALUES + "|not initialised"),
    Fault("unpack: one row too many is written", "unpack_matrix.cu", "if (row >= rows) return;",
          "if (row > rows) return;", "race|behind|outside|bounds|" + VALUES),
)  # fmt: skip


FIRST = {
    "route_rope.cu": ("experts_are_chosen", "attention_"),
    "decode_attention.cu": ("attention_",),
    "mla_attention.cu": ("latent_",),
    "gated_delta.cu": ("delta_nets_carry",),
    "indexer.cu": ("indexers_",),
    "step_control.cu": ("a_step_", "a_wait_"),
    "expert_layer.cu": ("a_step_places", "experts_of_F32"),
    "low_rank.cu": ("low_rank_",),
    "expert_prefill.cu": ("experts_add",),
    "expert_decode_float.cu": ("experts_of_F32", "experts_add", "decode_tiles", "experts_of_FP8"),
    "expert_decode_k.cu": ("experts_of_Q4_K",),
    "expert_prefill_float.cu": ("experts_of_BF16", "experts_add", "experts_of_FP8"),
    "unpack_matrix.cu": ("experts_of_F32",),
}
"""Beginnings of the cases that are likely to find a fault of a source; the others follow them."""


QUICK = {
    "latent attention: weights are summed before all are there",
    "place: groups begin behind their pairs",
    "combine: the token's weight instead of the pair's",
    "adapters: one rank too many",
}
"""A race, a bound and a value: compiled and caught within seconds."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in QUICK else [pytest.mark.slow])
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    shutil.copytree(KERNELS, tmp_path / "cuda")
    file = tmp_path / "cuda" / (fault.file or fault.source)
    text = file.read_text()
    assert text.count(fault.right) == 1, f"{file.name} holds {fault.right!r} {text.count(fault.right)} times"
    file.write_text(text.replace(fault.right, fault.wrong))
    output, program = tmp_path / "fault.o", tmp_path / PROGRAM
    compile_kernels(tmp_path / "cuda" / fault.source, output)
    link([output], program)
    done = subprocess.run(
        [program, *cases(program, FIRST[fault.source])],
        capture_output=True,
        text=True,
        check=False,
        timeout=570,
    )
    assert done.returncode != 0, "nothing was noticed"
    assert re.search(fault.says, done.stderr), done.stderr[-2000:]
