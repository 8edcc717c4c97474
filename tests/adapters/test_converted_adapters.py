"""`twofold convert`: an adapter in another form makes the same changes, to our reader, PEFT and llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from twofold.adapters.adapter import Adapter, LowRank
from twofold.adapters.gguf_writing import write_gguf
from twofold.adapters.peft_writing import write_peft
from twofold.adapters.reading import read_adapter
from twofold.models.model_files import open_model_files
from twofold.step.adapters import shapes_of
from twofold.tools.cli.main import main

from tests.adapters.adapter_files import COUNT, EXPERTS, HIDDEN, INNER, base, numbers
from tests.adapters.gguf_files import write_gguf_adapter
from tests.adapters.ktransformers_files import fused, write_kt
from tests.adapters.peft_models import Recipe, merge, train
from tests.tiny_models.adapters import write_tiny_adapter
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

peft = pytest.importorskip("peft")

TARGETS = {
    "r": 3,
    "lora_alpha": 5,
    "target_modules": ["q_proj", "o_proj", "embed_tokens", "lm_head"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
MODELS = {
    "qwen3_moe": TinyModel(),
    "mixtral": TinyModel(architecture="MixtralForCausalLM"),
    "deepseek_v3": EXAMPLES["deepseek_v3"],
    "gpt_oss": EXAMPLES["gpt_oss"],
}


def assert_same(one: Adapter, other: Adapter) -> None:
    assert one.products.keys() == other.products.keys()
    for key, product in one.products.items():
        found = other.products[key]
        np.testing.assert_allclose(found.b @ found.a, product.b @ product.a, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_peft_merges_the_written_adapter_as_the_first_one(tmp_path: Path, model_type: str) -> None:
    targets = TARGETS | {"target_modules": ["o_proj", "embed_tokens", "lm_head"]}
    recipe = Recipe(model_type, targets)
    trained = train(recipe, tmp_path / "first")
    adapter = read_adapter(tmp_path / "first", trained.base)
    (tmp_path / "written").mkdir()
    write_peft(adapter, trained.base, tmp_path / "written", base_path="")
    assert_same(adapter, read_adapter(tmp_path / "written", trained.base))
    again = merge(recipe, tmp_path / "written")
    for name, values in trained.after.items():
        np.testing.assert_allclose(again.after[name], values, atol=1e-5, err_msg=name)


def test_an_adapter_of_ktransformers_is_written_in_both_forms(tmp_path: Path) -> None:
    shapes = replace(base(), architecture="qwen3moe")
    adapter = read_adapter(write_kt(tmp_path / "kt", fused()), shapes)
    (tmp_path / "peft").mkdir()
    write_peft(adapter, shapes, tmp_path / "peft", base_path="")
    # Gate and up have no A in common, so the fused stack has both.
    assert read_adapter(tmp_path / "peft", shapes).max_rank == 4
    assert_same(adapter, read_adapter(tmp_path / "peft", shapes))


def test_experts_without_a_change_are_filled_with_zeros(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_down.1.weight.lora_a": numbers(2, INNER),
        "blk.0.ffn_down.1.weight.lora_b": numbers(HIDDEN, 2, seed=1),
    }
    shapes = replace(base(), architecture="qwen3moe")
    adapter = read_adapter(write_gguf_adapter(tmp_path / "one.gguf", tensors), shapes)
    write_gguf(adapter, shapes, tmp_path / "all.gguf", architecture="qwen3moe")
    found = read_adapter(tmp_path / "all.gguf", shapes)
    assert len(found.products) == COUNT
    for number in range(COUNT):
        change = found.products[f"{EXPERTS}.{number}.down_proj"]
        assert (change.b @ change.a).any() == (number == 1)


@pytest.mark.parametrize("family", MODELS)
def test_gguf_has_the_names_and_rows_of_llama_cpp(tmp_path: Path, family: str) -> None:
    """The base's own GGUF file is what llama.cpp adds B A to; products of both bases are the same."""
    directory = write_tiny_model(tmp_path / "model", MODELS[family])
    file = write_tiny_gguf(tmp_path / "base.gguf", MODELS[family])
    shapes = shapes_of(open_model_files(file))
    adapter = every_product(shapes)
    write_gguf(adapter, shapes, tmp_path / "a.gguf", architecture=shapes.architecture)
    assert_same(adapter, read_adapter(tmp_path / "a.gguf", shapes))
    if family != "deepseek_v3":  # its GGUF files hold kv_b in two
        for given, out in (("a.gguf", "peft"), ("peft", "b.gguf")):
            assert main(["convert", str(directory), str(tmp_path / given), str(tmp_path / out)]) == 0
        assert_same(adapter, read_adapter(tmp_path / "b.gguf", shapes))
    reader, tensors = (
        gguf.GGUFReader(tmp_path / "a.gguf"),
        {each.name for each in gguf.GGUFReader(file).tensors},
    )
    modules = {each.name.removesuffix(".lora_a").removesuffix(".lora_b") for each in reader.tensors}
    assert modules <= tensors
    assert len(modules) > 10
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == gguf.GGUFType.ADAPTER
    assert (fields["adapter.type"], fields["adapter.lora.alpha"]) == ("lora", 0.0)
    assert fields["general.architecture"] == shapes.architecture


def every_product(shapes: Any) -> Adapter:
    """A change of every matrix that GGUF files name, and of all routed experts."""
    names = {matrix.name: shapes.matrices[matrix.name] for group in shapes.gguf.values() for matrix in group}
    for layer, experts in shapes.experts.items():
        for number in range(experts.num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                names[f"{layer}.{number}.{part}"] = experts.shape(part)
    products = {
        name: LowRank(numbers(2, columns, seed=seed), numbers(rows, 2, seed=seed + 1))
        for seed, (name, (rows, columns)) in enumerate(names.items())
    }
    return Adapter("every", "", products, {}, "")


def test_what_cannot_be_converted_takes_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    adapter = write_tiny_adapter(tmp_path / "adapter", 1)
    (tmp_path / "there").mkdir()
    for words, message in (
        ([str(adapter), str(tmp_path / "there")], "exists; give another name"),
        ([str(adapter), str(tmp_path / "no/where")], "does not exist; make it first"),
        ([str(tmp_path / "none"), str(tmp_path / "out")], "expected a directory with adapter_config.json"),
    ):
        assert main(["convert", str(model), *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "model", "there"]
