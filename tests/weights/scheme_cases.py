"""How other tools store a matrix: configurations, stored parts and values, by the tools' own definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from tests.tiny_models.writing import TinyModel, tiny_config, tiny_weights, write_tiny_model

MODEL = TinyModel(
    hidden_size=128, moe_intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=2
)
Parts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A scheme's configuration, how it stores a matrix, and the format it is computed in."""

    config: dict[str, Any]
    store: Callable[[np.random.Generator, int, int], tuple[Parts, Any]]
    """(stored parts by suffix, the float32 values) of a matrix of (rows, columns)."""
    format: str
    of_experts: bool = False
    """Only experts are quantised."""
    rounded: float = 0.0
    """Largest relative difference from the tool's values: 2^-11 where float32 scales are rounded to float16."""
    ignore: list[str] = field(default_factory=list)


def compressed_tensors(
    bits: int,
    strategy: str,
    size: int | None,
    symmetric: bool = True,
    packed: bool = True,
    scales: Any = torch.bfloat16,
) -> Any:
    arguments = QuantizationArgs(
        num_bits=bits, type="int", strategy=strategy, group_size=size, symmetric=symmetric
    )

    def store(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
        groups = columns // size if size else 1
        half = 1 << (bits - 1)
        codes = torch.tensor(rng.integers(-half, half, (rows, columns)), dtype=torch.int8)
        scale = torch.tensor(rng.uniform(0.002, 0.02, (1, 1) if strategy == "tensor" else (rows, groups))).to(
            scales
        )
        zeros = (
            None if symmetric else torch.tensor(rng.integers(-half, half, (rows, groups)), dtype=torch.int8)
        )
        stored = {"weight_packed": pack_to_int32(codes, bits)} if packed else {"weight": codes}
        if packed:
            stored["weight_shape"] = torch.tensor([rows, columns])
        if zeros is not None:
            stored["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0) if packed else zeros
        given = torch.zeros_like(scale, dtype=torch.int8) if zeros is None else zeros
        values = dequantize(codes, scale.float(), given, arguments, dtype=torch.float32)
        return stored | {"weight_scale": scale.reshape(1) if strategy == "tensor" else scale}, values.numpy()

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": size,
        "symmetric": symmetric,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, store


def float8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    codes = torch.tensor(rng.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
    scale = torch.tensor([rng.uniform(0.01, 0.1)], dtype=torch.float32)
    return {"weight": codes, "weight_scale": scale, "input_scale": scale.clone()}, (
        codes.float() * scale
    ).numpy()


def float8_by_row(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    codes = torch.tensor(rng.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
    scale = torch.tensor(rng.uniform(0.01, 0.1, (rows, 1)), dtype=torch.bfloat16)
    return {"weight": codes, "weight_scale": scale}, (codes.float() * scale.float()).numpy()


def preset(name: str, scales: Any = torch.bfloat16, **changes: Any) -> Any:
    """A scheme of the library's own names, stored by its own compressor; `changes` of its weights' arguments."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    arguments = scheme.weights.model_copy(update=changes)
    scheme = scheme.model_copy(update={"weights": arguments})
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    is_float, is_power = arguments.type == "float", arguments.scale_dtype == torch.uint8

    def store(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
        weight = torch.tensor(rng.normal(0, 0.1, (rows, columns)), dtype=torch.float32)
        block = arguments.block_structure or (1, arguments.group_size or columns)
        shape = tuple(-(-size // each) for size, each in zip((rows, columns), block, strict=True))
        scale = torch.tensor(rng.uniform(0.002, 0.02, shape)).to(scales)
        if is_power:
            scale = 2.0 ** torch.tensor(rng.integers(-7, -3, shape), dtype=torch.float32)
        state: Parts = {"weight": weight, "weight_scale": scale.float()}
        if not arguments.symmetric:
            half = 1 << (arguments.num_bits - 1)
            state["weight_zero_point"] = torch.tensor(rng.integers(-half, half, shape), dtype=torch.int8)
        stored = compressor.compress(state, scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"].float()
        return stored | ({} if is_power else {"weight_scale": scale}), values.numpy()

    weights = arguments.model_dump(mode="json", exclude_none=True)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    assert is_float or not is_power
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, store


def in_groups_out_of_order(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    """`actorder: group` of earlier versions: a column's group is in weight_g_idx."""
    codes = torch.tensor(rng.integers(-8, 8, (rows, columns)), dtype=torch.int8)
    scale = torch.tensor(rng.uniform(0.002, 0.02, (rows, columns // 32)), dtype=torch.bfloat16)
    order = torch.tensor(rng.permutation(columns) // 32, dtype=torch.int32)
    values = codes * scale.float()[:, order]
    return {
        "weight_packed": pack_to_int32(codes, 4), "weight_shape": torch.tensor([rows, columns]),
        "weight_scale": scale, "weight_g_idx": order,
    }, values.numpy()  # fmt: skip


def float8_blocks(rows_of_block: int, columns_of_block: int, scales: Any = torch.float32) -> Any:
    """transformers' FP8, dequantised as it does."""

    def store(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
        codes = torch.tensor(rng.normal(size=(rows, columns))).to(torch.float8_e4m3fn)
        shape = (-(-rows // rows_of_block), -(-columns // columns_of_block)) if rows_of_block else ()
        if scales == torch.float8_e8m0fnu:
            scale = (2.0 ** torch.tensor(rng.integers(-8, -3, shape), dtype=torch.float32)).to(scales)
        else:
            scale = torch.tensor(rng.uniform(0.01, 0.1, shape)).to(scales)
        block = [rows_of_block, columns_of_block] if rows_of_block else None
        values = _dequantize_fp8_weight(codes, scale, block, torch.float32)
        stored = {"weight": codes, "weight_scale_inv": scale}
        return stored | ({} if block else {"activation_scale": torch.tensor(0.02)}), values.numpy()

    config = {
        "quant_method": "fp8", "activation_scheme": "dynamic" if rows_of_block else "static",
        "weight_block_size": [rows_of_block, columns_of_block] if rows_of_block else None,
    }  # fmt: skip
    return config, store


FLOAT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "g": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    },
}


FLOAT8_BY_ROW = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}


FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


def codes_of(rng: np.random.Generator, rows: int, columns: int) -> tuple[Any, Any, Any]:
    """NVFP4's codes, neighbours in a byte; their values; scales in E4M3 of 16 columns, subnormal ones too."""
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    scales = torch.tensor(rng.integers(1, 0x7F, (rows, columns // 16), np.uint8)).view(torch.float8_e4m3fn)
    return torch.tensor(codes), unpack_fp4_from_uint8(torch.tensor(codes), rows, columns).float(), scales


def nvfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    packed, values, scales = codes_of(rng, rows, columns)
    whole = torch.tensor([rng.uniform(3000, 9000)], dtype=torch.float32)
    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    expected = dequantize(values, scales.float(), None, arguments, torch.float32, global_scale=whole)
    return {
        "weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole,
        "input_global_scale": torch.tensor([123.0]),
    }, expected.numpy()  # fmt: skip


NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
}


def modelopt_nvfp4(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    """As `modelopt`'s NVFP4QTensor.dequantize: the scales' product first, in float32."""
    packed, values, scales = codes_of(rng, rows, columns)
    whole = torch.tensor(rng.uniform(1e-4, 3e-4), dtype=torch.float32)
    expected = values.reshape(rows, -1, 16) * (scales.float() * whole)[..., None]
    return {
        "weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.01),
    }, expected.reshape(rows, columns).numpy()  # fmt: skip


def modelopt_fp8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    parts, values = float8(rng, rows, columns)
    return {name: part if name == "weight" else part[0] for name, part in parts.items()}, values


MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_scheme": {"num_bits": 8},
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
}  # fmt: skip


def gptq(bits: int, size: int, *, sym: bool = True, act_order: bool = False, v2: bool = False) -> Any:
    """Stored word by word, as the format is defined."""
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": act_order,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "dynamic": {"-:.*gate$": {}},
    }  # fmt: skip

    def store(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
        group = columns if size < 0 else size
        groups, top = -(-columns // group), 1 << bits
        codes = rng.integers(0, top, (columns, rows))
        zeros = np.full((groups, rows), top // 2) if sym else rng.integers(1, top, (groups, rows))
        scales = rng.uniform(0.002, 0.02, (groups, rows)).astype(np.float16)
        order = np.arange(columns) // group
        if act_order:
            order = rng.permutation(order)
        qweight = _words(codes, bits)
        qzeros = np.ascontiguousarray(_words(((zeros - (0 if v2 else 1)) % top).T, bits).T)
        whole = (codes - zeros[order]).T
        if act_order:
            values = (whole.astype(np.float16) * scales[order].T).astype(np.float32)
        else:
            values = whole.astype(np.float32) * scales[order].T.astype(np.float32)
        stored = {
            "qweight": qweight.view(np.int32),
            "qzeros": qzeros.view(np.int32),
            "scales": scales,
            "g_idx": order,
        }
        return {
            part: torch.tensor(each.astype(np.int32) if part == "g_idx" else each)
            for part, each in stored.items()
        }, values

    return config, store


def _words(fields: Any, bits: int) -> Any:
    """Rows of `fields` as bits of the words of their column, lowest first."""
    words = np.zeros((len(fields) * bits // 32 + 1, fields.shape[1]), np.uint64)
    for at, row in enumerate(fields.astype(np.uint64)):
        word, shift = divmod(at * bits, 32)
        moved = row << np.uint64(shift)
        words[word] |= moved & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            words[word + 1] |= moved >> np.uint64(32)
    return words[: len(fields) * bits // 32].astype(np.uint32)


def awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Any]:
    places = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the order of their fields in a word
    codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // 128, rows))
    scales = rng.uniform(0.002, 0.02, zeros.shape).astype(np.float16)

    def words(integers: Any) -> Any:
        packed = np.zeros((len(integers), rows // 8), np.uint32)
        for at, place in enumerate(places):
            packed |= integers[:, place::8].astype(np.uint32) << np.uint32(4 * at)
        return torch.tensor(packed.view(np.int32))

    values = (codes - zeros.repeat(128, 0)).T * scales.repeat(128, 0).T.astype(np.float32)
    return {"qweight": words(codes), "qzeros": words(zeros), "scales": torch.tensor(scales)}, values.astype(
        np.float32
    )


SORTED: dict[str, Any] = compressed_tensors(4, "group", 32)[0]
SORTED["config_groups"]["group_0"]["weights"]["actorder"] = "group"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
CASES = {
    "int4 in groups of 32 (Kimi-K2.5's)": Case(*compressed_tensors(4, "group", 32), "q4_0", of_experts=True),
    "int4 in groups of 128": Case(*compressed_tensors(4, "group", 128, scales=torch.float16), "q4_0"),
    "int4 by row": Case(*compressed_tensors(4, "channel", None), "q4_0"),
    "int4 with zero points": Case(*compressed_tensors(4, "group", 32, symmetric=False), "q8_0"),
    "int4 with zero points by row": Case(*compressed_tensors(4, "channel", None, symmetric=False), "int8"),
    "int8 in words": Case(*compressed_tensors(8, "group", 64), "q8_0"),
    "int8 by row": Case(*compressed_tensors(8, "channel", None, packed=False), "int8"),
    "int8 by tensor": Case(*compressed_tensors(8, "tensor", None, packed=False), "int8"),
    "float8 by tensor": Case(FLOAT8, float8, "fp8", of_experts=True),
    "float8 by row": Case(FLOAT8_BY_ROW, float8_by_row, "fp8"),
    "fbgemm's float8 by row": Case(FBGEMM, float8_by_row, "fp8"),
    "nvfp4": Case(NVFP4, nvfp4, "nvfp4"),
    "modelopt nvfp4": Case(MODELOPT, modelopt_nvfp4, "nvfp4", of_experts=True),
    "modelopt fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt_fp8, "fp8"),
    "gptq": Case(*gptq(4, 64), "q4_0"),
    "gptq, one group": Case(*gptq(4, -1), "q4_0"),
    "gptq v2": Case(*gptq(4, 128, v2=True), "q4_0"),
    "gptq with zero points": Case(*gptq(4, 128, sym=False), "int8"),
    "gptq v2 with zero points": Case(*gptq(4, 32, sym=False, v2=True), "q8_0"),
    "gptq in 8 bits": Case(*gptq(8, 128), "int8"),
    "gptq with act-order": Case(*gptq(4, 32, sym=False, act_order=True), "f16"),
    "gptq in 3 bits": Case(*gptq(3, 128), "q4_0"),
    "gptq in 2 bits": Case(*gptq(2, 64, sym=False), "q4_0"),
    "gptq with a ragged last group": Case(*gptq(4, 96), "q4_0"),
    "gptq with groups of no block": Case(*gptq(4, 48), "f16"),
    "awq": Case(AWQ, awq, "int8"),
    "2 bits": Case(*preset("W2A16"), "q4_0"),
    "3 bits": Case(*preset("W3A16"), "q4_0"),
    "5 bits": Case(*preset("W5A16"), "int8"),
    "6 bits, groups of 32": Case(*preset("W6A16", group_size=32), "q8_0"),
    "7 bits": Case(*preset("W7A16"), "int8"),
    "3 bits with zero points": Case(*preset("W3A16", symmetric=False, group_size=32), "q4_0"),
    "7 bits with zero points": Case(*preset("W7A16", symmetric=False), "int8"),
    "8 bits with zero points": Case(*preset("W8A16", symmetric=False), "f16"),
    "W4A8": Case(*preset("W4A8"), "q4_0"),
    "W4AFP8": Case(*preset("W4AFP8"), "q4_0"),
    "int4 with float16 scales": Case(*preset("W4A16", scales=torch.float16), "q4_0"),
    "int4 with float32 scales": Case(*preset("W4A16", scales=torch.float32), "q4_0", rounded=2.0**-11),
    "int8 with float32 scales": Case(*preset("W8A16", scales=torch.float32), "int8", rounded=2.0**-11),
    "int4 in sorted groups": Case(
        SORTED, in_groups_out_of_order, "f16"
    ),
    "float8 in blocks": Case(*preset("FP8_BLOCK", scales=torch.float32), "fp8"),
    "float8 in small blocks": Case(*preset("FP8_BLOCK", scales=torch.float32, block_structure=[64, 64]), "f16"),
    "mxfp4": Case(*preset("MXFP4"), "mxfp4"),
    "mxfp6": Case(*preset("MXFP6A16"), "bf16"),
    "mxfp8": Case(*preset("MXFP8A16"), "bf16"),
    "transformers' float8": Case(*float8_blocks(128, 128), "fp8"),
    "transformers' float8 in tall blocks": Case(*float8_blocks(64, 128), "fp8"),
    "transformers' float8 in small blocks": Case(*float8_blocks(32, 32), "f16"),
    "transformers' float8 by tensor (Mistral's)": Case(*float8_blocks(0, 0, torch.bfloat16), "fp8"),
    "transformers' float8 with exponents": Case(*float8_blocks(128, 128, torch.float8_e8m0fnu), "fp8"),
    "transformers' mxfp8": Case(*float8_blocks(1, 32, torch.float8_e8m0fnu), "bf16"),
}  # fmt: skip


def write(directory: Path, case: Case, model: TinyModel = MODEL) -> dict[str, Any]:
    """The model, its matrices stored by the scheme → their values by name."""
    rng = np.random.default_rng(1)
    stored: Parts = {}
    values: dict[str, Any] = {}
    for name, weight in tiny_weights(model).items():
        is_expert = ".experts." in name
        if not name.endswith("_proj.weight") or (case.of_experts and not is_expert):
            stored[name] = torch.tensor(weight)
            continue
        parts, values[name] = case.store(rng, *weight.shape)
        stored |= {
            f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()
        }
    write_tiny_model(directory, model)
    save_file(stored, str(directory / "model.safetensors"))
    write_config(directory, case.config | ({"ignore": case.ignore} if case.ignore else {}), model)
    return values


def write_config(directory: Path, quantization: dict[str, Any], model: TinyModel = MODEL) -> None:
    config = tiny_config(model) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))


def stored_by_expert(name: str, of_expert_3: str | None) -> Any:
    """How a tensor is stored: expert 3 by another case than the other experts, or plainly; the rest plainly."""
    if ".experts." not in name or not name.endswith("_proj.weight"):
        return None
    return CASES["gptq"].store if ".experts.3." not in name else of_expert_3 and CASES[of_expert_3].store


def write_by_expert(
    directory: Path, of_expert_3: str | None, dynamic: dict[str, Any], model: TinyModel = MODEL
) -> dict[str, Any]:
    """The model, its experts stored by `stored_by_expert` → the values of its tensors by name."""
    rng = np.random.default_rng(1)
    stored: Parts = {}
    values: dict[str, Any] = {}
    for name, weight in tiny_weights(model).items():
        store = stored_by_expert(name, of_expert_3)
        parts, values[name] = (
            store(rng, *weight.shape) if store else ({"weight": torch.tensor(weight)}, weight)
        )
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    write_tiny_model(directory, model)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, str(directory / "model.safetensors")
    )
    write_config(directory, CASES["gptq"].config | {"dynamic": dynamic}, model)
    return values
