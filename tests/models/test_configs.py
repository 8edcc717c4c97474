"""config.json and generation_config.json → ModelConfig, and every way they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from twofold.api.errors import ModelLoadError
from twofold.blocks.attention.norms import NO_NORMS, HeadNorms
from twofold.blocks.attention.projections import Projections
from twofold.blocks.attention.selection import AllPositions, Window
from twofold.blocks.block import RoutedShape
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.models import read_config
from twofold.models.registry import ARCHITECTURES
from twofold.models.unsupported import refusal

from tests.tiny_models.writing import TinyModel, tiny_config, write_tiny_model


def write_config(directory: Path, model: TinyModel | None = None, **changes: Any) -> Path:
    config = tiny_config(model or TinyModel()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_qwen3_moe_fields(tmp_path: Path) -> None:
    model = TinyModel(num_layers=4, mlp_only_layers=(1,), decoder_sparse_step=1, attention_bias=True)
    config = read_config(write_tiny_model(tmp_path, model))
    assert config.architecture == "Qwen3MoeForCausalLM"
    attention = Gqa(1, 48, 4, 2, 16, 1e-6, project=Projections(bias=True), norms=HeadNorms(), o_bias=True)
    assert (config.hidden_size, config.num_layers, config.rope_dim) == (48, 4, 16)
    assert config.layers[1] == (attention, DenseFfn(1, 48, 64, 1e-6))
    assert config.layers[2] == (
        replace(attention, layer=2),
        Router(2, 48, 8, 2, 1e-6, renormalise=True),
        RoutedExperts(2, 48, 8, 2, 24),
    )
    assert config.moe_layers == (0, 2, 3)
    assert config.routed == RoutedShape(8, 2, 48, 24)
    assert config.eos_token_ids == (2, 0)
    assert (config.generation.temperature, config.generation.top_p) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("num_layers", "step", "dense", "expected"),
    [
        (5, 1, (), (0, 1, 2, 3, 4)),
        (5, 2, (), (1, 3)),
        (6, 3, (5,), (2,)),
        (3, 1, (0, 2), (1,)),
    ],
)
def test_moe_layers(
    tmp_path: Path, num_layers: int, step: int, dense: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    model = TinyModel(num_layers=num_layers, decoder_sparse_step=step, mlp_only_layers=dense)
    assert read_config(write_config(tmp_path, model)).moe_layers == expected


def test_mixtral_fields(tmp_path: Path) -> None:
    model = TinyModel(architecture="MixtralForCausalLM", sliding_window=32)
    config = read_config(write_tiny_model(tmp_path, model))
    assert config.moe_layers == (0, 1, 2)
    assert config.routed.intermediate_size == 24
    attention, router, _ = config.layers[2]
    assert isinstance(attention, Gqa)
    assert attention.norms == NO_NORMS
    assert attention.select == Window(32)
    assert isinstance(router, Router)
    assert router.renormalise


def test_what_transformers_5_calls_things(tmp_path: Path) -> None:
    directory = write_config(
        tmp_path, num_experts=None, num_local_experts=8, torch_dtype="bfloat16", dtype=None
    )
    config = read_config(directory)
    assert config.routed.num_experts == 8
    assert config.dtype == "bfloat16"


def test_defaults_when_fields_are_absent(tmp_path: Path) -> None:
    raw = tiny_config(TinyModel())
    for key in ("head_dim", "rope_parameters", "rms_norm_eps", "dtype", "eos_token_id", "norm_topk_prob"):
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    assert config.layers[0][0] == Gqa(0, 48, 4, 2, 12, 1e-6, norms=HeadNorms())
    assert config.rope_dim == 12
    assert config.rope.theta == 10_000.0
    assert config.head.eps == 1e-6
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()
    _, router, _ = config.layers[0]
    assert isinstance(router, Router)
    assert not router.renormalise


def test_sliding_window_counts_only_when_switched_on(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, sliding_window=8, use_sliding_window=False))
    assert config.layers[0][0].select == AllPositions()
    config = read_config(write_config(tmp_path, sliding_window=8, use_sliding_window=True))
    assert config.layers[0][0].select == Window(8)


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_both_forms_of_rope_settings(tmp_path: Path, form: Any) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}
    model = TinyModel(rope_scaling=scaling, rope_form=form, rope_theta=500.0)
    rope = read_config(write_config(tmp_path, model)).rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 500.0, 4.0)
    assert (rope.original_max_position_embeddings, rope.beta_fast) == (64, 16.0)


def test_rope_type_was_once_called_type(tmp_path: Path) -> None:
    directory = write_config(tmp_path, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2})
    assert read_config(directory).rope.kind == "linear"


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        # null, as transformers: the ratio of both lengths
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_context_length(tmp_path: Path, scaling: Any, expected: int) -> None:
    assert read_config(write_config(tmp_path, TinyModel(rope_scaling=scaling))).max_context == expected


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"architectures": ["OPTForCausalLM"]}, ["'OPTForCausalLM'", "see `twofold models`"]),
        ({"architectures": []}, ["architectures"]),
        ({"architectures": None}, ["architectures"]),
        (
            {"quantization_config": {"quant_method": "exl2", "bits": 4}},
            ["quantization_config", "exl2", "not supported"],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64]}},
            ["weight_block_size", "[64]", "rows and columns"],
        ),
        ({"quantization_config": "fp8"}, ["quantization_config", "an object"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'", "integer"]),
        ({"layer_types": [7] * 94, "architectures": ["Qwen2ForCausalLM"]}, ["layer_types", "7, … 86 more]"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim 15", "even"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "8 experts"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "above 0"]),
        ({"dtype": "int8"}, ["dtype", "'int8'", "bfloat16"]),
        ({"mlp_only_layers": ["x"]}, ["mlp_only_layers", "integers"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "true or false"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type", "'longrope'", "yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "factor", "missing"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters", "factor", "missing"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
            ["rope_parameters", "factor", "missing"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": None}},
            ["rope_parameters", "factor", "missing"],
        ),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["rope_theta", "-1.0"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "object"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["per layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({"eos_token_id": 320}, ["eos_token_id", "320"]),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
            ["dynamic", "head_dim"],
        ),
    ],
)
def test_wrong_config(tmp_path: Path, changes: Change, fragments: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_config(write_config(tmp_path, None, **changes))
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path / "config.json") in message
    for fragment in fragments:
        assert fragment in message


def damage_json(text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / "config.json").write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (lambda directory: (directory / "config.json").unlink(), ["config.json: missing"]),
        (damage_json("{"), ["config.json: not valid JSON", "line 1"]),
        (damage_json("[1]"), ["config.json: holds a JSON list", "object"]),
        (damage_json("[" * 100_000), ["config.json: not valid JSON"]),
        (
            lambda directory: (directory / "config.json").write_bytes(b"\xff\xfe{}"),
            ["config.json: not UTF-8"],
        ),
        (
            lambda directory: (directory / "generation_config.json").write_text('{"top_p": 2}'),
            ["generation_config.json: top_p is 2", "at most 1"],
        ),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], None], fragments: list[str]) -> None:
    directory = write_config(tmp_path)
    damage(directory)
    with pytest.raises(ModelLoadError) as caught:
        read_config(directory)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such model directory"):
        read_config(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="is a file, expected a GGUF file or a directory"):
        read_config(tmp_path / "file")


def test_a_single_eos_token_and_none_in_generation_config(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, eos_token_id=[7, 8]))
    assert config.eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_config(tmp_path).eos_token_ids == (5,)


# What a refusal of another family says, in two lines of a terminal: the missing part, and where the list is.
# By transformers' model type: the class, and what the refusal names.
FOREIGN = {
    "mamba": ("MambaForCausalLM", "state-space layers (Mamba) (state_size)"),
    "rwkv": ("RwkvForCausalLM", "recurrent layers (RWKV, RG-LRU) (rescale_every)"),
    "vit": ("ViTForImageClassification", "it reads images alone"),
    "bert": ("BertForMaskedLM", "it is or has an encoder"),
    "t5": ("T5ForConditionalGeneration", "it is or has an encoder"),
    "phimoe": ("PhimoeForCausalLM", "norms that subtract the mean (LayerNorm)"),
    "opt": ("OPTForCausalLM", "its layers are not described here"),
}


@pytest.mark.parametrize("model_type", FOREIGN)
def test_a_foreign_config_is_refused_with_what_is_missing(tmp_path: Path, model_type: str) -> None:
    import transformers

    architecture, missing = FOREIGN[model_type]
    _refused(
        tmp_path,
        transformers.AutoConfig.for_model(model_type).to_dict() | {"architectures": [architecture]},
        missing,
    )


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (
            {"index_topk": 2048, "index_n_heads": 64},
            "a sparse indexer other than DeepSeek-V3.2's (index_topk)",
        ),
        ({"hc_mult": 4}, "hyper-connections that mix their streams (hc_mult)"),
        ({"text_config": {"linear_attn_config": {"num_heads": 4}}}, "(KDA) (linear_attn_config)"),
        ({"index_topk": None, "state_size": False}, "its layers are not described here"),
    ],
)
def test_missing_parts_are_found_by_their_keys(tmp_path: Path, keys: dict[str, Any], missing: str) -> None:
    _refused(tmp_path, {"architectures": ["AnythingForCausalLM"], "vocab_size": 9, **keys}, missing)


def _refused(directory: Path, config: dict[str, Any], missing: str) -> None:
    (directory / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ModelLoadError) as error:
        read_config(directory)
    text = str(error.value).removeprefix(str(directory))
    assert missing in text
    assert "see `twofold models` or docs/guides/models.md" in text
    assert len(text) <= 240
    assert text.isprintable()
    assert not [name for name in ARCHITECTURES if name in text]


def test_a_gguf_file_of_another_family_names_what_is_missing(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_ssm_state_size(16)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"'mamba', which is not supported: it needs state-space layers"):
        read_config(tmp_path / "model.gguf")


def test_an_encoder_is_recognised_by_its_gguf_header() -> None:
    assert "has an encoder" in refusal("bert", {"attention.causal": False})
