"""Which share of the machine's ceilings `twofold bench` says is reached."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from twofold.blocks import ops
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.models.sizing import dense_stretches
from twofold.tools.cli.doctor.machine_shares import Ceilings, least_times
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, write_tiny_model

MODEL = TinyModel(num_experts=8, top_k=2)
ARGUMENTS = ("--prompt-tokens", "9", "--new-tokens", "8", "--repeats", "1", "--no-compare-transformers")
RATES = {f"{kind}_gop_per_s": 1.0 for kind in ("f32", "bf16", "int8", "bf16_tiles", "int8_tiles")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("shares"), MODEL)


@pytest.fixture
def files(tiny: Path) -> ModelFiles:
    return open_model_files(tiny)


def ceilings(**figures: float) -> Ceilings:
    return Ceilings("test", 1, {"read_gb_per_s": 1.0, "fork_join_us": 1.0} | RATES | figures)


def test_a_decoded_token_reads_dense_weights_and_its_experts(files: ModelFiles) -> None:
    dense, flops, _ = dense_stretches(files)
    one_expert = 3 * MODEL.hidden_size * MODEL.moe_intermediate_size
    experts = MODEL.num_layers * MODEL.top_k
    least = least_times(ceilings(), files, 1, context_len=0, step_tokens=1)
    # Panels of 32 rows and whole blocks of columns: an expert takes more than its 4 bytes a weight.
    packed = sum(
        block.host_bytes(weights) / MODEL.num_experts * MODEL.top_k
        for block, weights in files.blocks()
        if weights.specs.keys() & {"gate.0", "gate"} and "norm" not in weights.specs
    )
    assert packed >= 4 * one_expert * experts
    assert least.num_bytes == pytest.approx(sum(dense) + packed)
    assert least.read_s == pytest.approx(1e-9 * least.num_bytes)
    assert least.products_s == pytest.approx(1e-9 * (sum(flops) + 2 * one_expert * experts))
    assert least.shares(2 * least.read_s)["of_read"] == pytest.approx(0.5)


def test_each_step_of_a_long_prompt_reads_the_weights_again(files: ModelFiles) -> None:
    head = files.config.head.cost(files.head).num_bytes
    once = least_times(ceilings(), files, 8, context_len=0, step_tokens=64).num_bytes - head
    keys_and_values = 8 * 2 * 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim
    assert least_times(ceilings(), files, 16, context_len=0, step_tokens=8).num_bytes == pytest.approx(
        2 * once + keys_and_values + head
    )


def test_products_are_those_that_a_format_is_multiplied_in() -> None:
    fast = ceilings(
        int8_gop_per_s=2.0, int8_tiles_gop_per_s=4.0, bf16_gop_per_s=8.0, bf16_tiles_gop_per_s=16.0
    )
    assert fast.products_s(1e9, "f32") == 1.0
    in_tiles = ops.products_of("q8_0") == "int8_tiles"
    assert fast.products_s(1e9, "q8_0") == (0.25 if in_tiles else 0.5)
    # Vectors that do more than the tiles bound what a product can reach.
    assert ceilings(int8_gop_per_s=8.0).products_s(1e9, "q8_0") == 0.125


def test_bench_begins_with_the_ceilings(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny), "--accelerator", "none", *ARGUMENTS]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("this machine at most (")
    assert re.search(r"of read +\d+% +\d+%", reported)
    assert re.search(r"of products +\d+% +\d+%", reported)
    assert reported.index("of products") < reported.index("experts")


def test_json_has_the_same(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny), "--accelerator", "none", "--json", *ARGUMENTS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"read_gb_per_s", "fork_join_us", "f32_gop_per_s", "cpu_isa"} <= found["ceilings"].keys()
    step_s = found["twofold"]["decode_ms"] * 1e-3 / 7
    decode = found["shares"]["decode"]
    assert decode["of_read"] == pytest.approx(decode["gb"] / found["ceilings"]["read_gb_per_s"] / step_s)
    assert found["profile"]["decode"]["parts_us"]["experts"] > 0


def test_no_shares_are_reported_with_a_device(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulated = ("--accelerator", "emulated:rtx4090-pcie4", "--gpu-experts-ratio", "0.25")
    assert main(["bench", str(tiny), "--json", *emulated, *ARGUMENTS]) == 0
    assert json.loads(capsys.readouterr().out)["shares"] is None
