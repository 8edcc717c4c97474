"""Adapters that the installed PEFT writes: the base's weights with the changes that are read are PEFT's merged ones."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.adapters.reading import read_adapter

from tests.adapters.adapter_files import factors, write
from tests.adapters.peft_models import TYPES, Recipe, Trained, merge, train, with_adapter

peft = pytest.importorskip("peft")
VERSION = tuple(map(int, peft.__version__.split(".")[:2]))

_ATTENTION = {"deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def attention(model_type: str) -> list[str]:
    return _ATTENTION.get(model_type, ["q_proj", "k_proj", "v_proj", "o_proj"])


def lora(*modules: str, **settings: Any) -> dict[str, Any]:
    """Settings of an adapter."""
    return {"r": 3, "lora_alpha": 5, "target_modules": list(modules), **settings}


def recipes() -> dict[str, Recipe]:
    """Recipes by the name of their test."""
    found = {}
    experts = lora("o_proj", target_parameters=_EXPERTS)
    for kind in TYPES:
        found[f"{kind} attention"] = Recipe(kind, lora(*attention(kind)))
        found[f"{kind} experts"] = Recipe(kind, experts)
    found["dense and shared experts"] = Recipe("deepseek_v3", lora("up_proj", "gate_proj", "down_proj"))
    found["shared expert"] = Recipe("qwen2_moe", lora("up_proj", "gate_proj", "down_proj", r=2))
    qwen = {
        "patterns": lora(
            *attention("qwen3_moe"),
            rank_pattern={"k_proj": 5, r"layers\.0\..*v_proj": 2},
            alpha_pattern={"q_proj": 11, "1.*o_proj": 1},
        ),
        "patterns of parameters": experts
        | {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 9}},
        "rsLoRA": lora("k_proj", r=5, use_rslora=True, target_parameters=_EXPERTS),
        "embedding and head as a whole": lora("q_proj", modules_to_save=["embed_tokens", "lm_head"]),
        "embedding and head": lora("embed_tokens", "lm_head"),
    }
    found |= {name: Recipe("qwen3_moe", adapter) for name, adapter in qwen.items()}
    # Gate and up have as many rows as columns; the other pair shows how the stacks are kept.
    found["square gate and up"] = Recipe("qwen3_moe", experts, {"moe_intermediate_size": 16})
    found["square down"] = Recipe("gpt_oss", experts, {"intermediate_size": 32})
    alone = lora("o_proj", target_parameters=_EXPERTS[:1])
    found["square gate and up alone"] = Recipe("qwen3_moe", alone, {"moe_intermediate_size": 16})
    return found


RECIPES = recipes()


def assert_merged(trained: Trained, directory: Path) -> None:
    """The adapter in `directory` changes the base's weights as PEFT did."""
    weights = with_adapter(trained, read_adapter(directory, trained.base))
    changed = [
        name for name, values in trained.after.items() if not np.array_equal(values, trained.before[name])
    ]
    assert len(changed) >= 2
    for name, values in trained.after.items():
        np.testing.assert_allclose(weights[name], values, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", RECIPES)
def test_changes_are_those_of_peft(tmp_path: Path, name: str) -> None:
    assert_merged(train(RECIPES[name], tmp_path), tmp_path)


@pytest.mark.skipif(VERSION < (0, 20), reason="this PEFT does not load experts one by one into fused ones")
@pytest.mark.parametrize(
    ("model_type", "module", "names"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_that_older_transformers_kept_one_by_one(
    tmp_path: Path, model_type: str, module: str, names: tuple[str, str, str]
) -> None:
    tensors = {}
    for layer, number, (name, rows, columns) in itertools.product(
        range(2), range(5), zip(names, (24, 24, 32), (32, 32, 24), strict=True)
    ):
        tensors |= factors(f"model.layers.{layer}.{module}.experts.{number}.{name}", rows, columns)
    write(tmp_path, tensors, target_modules=list(names), task_type="CAUSAL_LM")
    assert_merged(merge(Recipe(model_type, {}), tmp_path), tmp_path)
