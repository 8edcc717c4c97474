"""A GGUF file's tensors under Hugging Face's names, as the model plan asks for them.

Two things differ from a Hugging Face checkpoint beside the names. Files of architecture "llama" hold the rows of q
and k in the order in which rotation pairs neighbours; they are put back where they were, which moves rows and
changes none. And llama.cpp's quantiser falls back to Q5_0, Q5_1 or IQ4_NL where a row does not fill blocks of 256
columns: these, and Q4_1, are re-encoded as Q8_0 when read. For Q5_0 and IQ4_NL that is exact (their values are
small integers times the same scale); Q4_1 and Q5_1 have a minimum as well and are rounded to 127 steps of a block's
largest magnitude.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.models.config import ModelConfig
from twofold.models.gguf_config import gguf_architecture
from twofold.weights.gguf_file import GgufFile, GgufTensor
from twofold.weights.tensor_source import TensorEntry, TensorSource
from twofold.weights.weight_format import source_row_bytes

U8 = npt.NDArray[np.uint8]

_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F32": "f32", "F16": "f16", "BF16": "bf16", "Q8_0": "q8_0", "Q4_0": "q4_0",
        "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
    }
)  # fmt: skip
_WHOLE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_OF_LAYER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
        **{
            f"attn_{theirs}.{kind}": f"self_attn.{ours}_proj.{kind}"
            for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
            for kind in ("weight", "bias")
        },
        **{f"ffn_{name}_exps.weight": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
        **{f"ffn_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    }
)
_LAYER: Final = re.compile(r"blk\.(\d{1,5})\.(.+)")
_ONE_EXPERT: Final = re.compile(r"ffn_(gate|up|down)\.(\d{1,5})\.weight")
_QKV: Final = re.compile(r"attn_qkv\.(weight|bias)")


class GgufSource(TensorSource):
    """All tensors of a GGUF file by their Hugging Face names."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Raises ModelLoadError for a tensor that no architecture we run has."""
        entries: dict[str, TensorEntry] = {}
        self._recoders: dict[str, Callable[[U8], U8]] = {}
        for tensor in file.tensors.values():
            if tensor.name == "rope_freqs.weight":  # part of the configuration
                continue
            for name, part in _translated(tensor, config):
                if name in entries:
                    raise ModelLoadError(
                        f"{tensor.file}: tensor {tensor.name} is there twice, under an older name too; convert it again"
                    )
                entries[name] = self._entry(name, part)
        self._heads: dict[str, int] = {}
        if gguf_architecture(file).rotates_neighbours:
            for name in entries:
                projection = re.search(r"self_attn\.([qk])_proj\.", name)
                if projection is not None:
                    self._heads[name] = config.num_heads if projection[1] == "q" else config.num_kv_heads
        super().__init__(file.path, entries)

    def entry(self, name: str) -> TensorEntry:
        """Where tensor `name` lies. Raises ModelLoadError that says what the file would call it."""
        if name not in self:
            raise ModelLoadError(
                f"{self.where}: tensor {_gguf_name(name)} is missing from the file's {len(self)} tensors; the download "
                "is incomplete or the conversion was"
            )
        return super().entry(name)

    def _entry(self, name: str, tensor: GgufTensor) -> TensorEntry:
        format, recoded_bytes = _FORMATS.get(tensor.type_name), None
        recoder = _RECODERS.get(tensor.type_name)
        if recoder is not None:
            self._recoders[name] = recoder
            format = "q8_0"
            recoded_bytes = math.prod(tensor.shape[:-1]) * source_row_bytes(format, tensor.shape[-1])
        return TensorEntry(
            name=name,
            file=tensor.file,
            dtype=tensor.type_name,
            shape=tensor.shape,
            offset=tensor.offset,
            num_bytes=tensor.num_bytes,
            format=format,
            recoded_bytes=recoded_bytes,
        )

    def _elements(self, entry: TensorEntry, format: str) -> npt.NDArray[Any]:
        elements = super()._elements(entry, format)
        recoder = self._recoders.get(entry.name)
        if recoder is not None:
            elements = recoder(elements)
        heads = self._heads.get(entry.name)
        if heads is None:
            return elements
        # Row 2i + half of a head was row half * d/2 + i.
        pairs = elements.reshape(heads, entry.shape[0] // heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _translated(tensor: GgufTensor, config: ModelConfig) -> list[tuple[str, GgufTensor]]:
    """Our names for one of the file's tensors, each with the rows it has."""
    if tensor.name in _WHOLE:
        return [(_WHOLE[tensor.name], tensor)]
    match = _LAYER.fullmatch(tensor.name)
    if match is not None:
        prefix, rest = f"model.layers.{int(match[1])}", match[2]
        if rest in _OF_LAYER:
            return [(f"{prefix}.{_OF_LAYER[rest]}", tensor)]
        expert = _ONE_EXPERT.fullmatch(rest)
        if expert is not None:
            return [(f"{prefix}.mlp.experts.{int(expert[2])}.{expert[1]}_proj.weight", tensor)]
        joined = _QKV.fullmatch(rest)
        if joined is not None:
            return _split_qkv(tensor, config, f"{prefix}.self_attn", joined[1])
    raise ModelLoadError(
        f"{tensor.file}: tensor {tensor.name} is not part of {config.architecture}; choose a model of a supported "
        "architecture"
    )


def _split_qkv(
    tensor: GgufTensor, config: ModelConfig, prefix: str, kind: str
) -> list[tuple[str, GgufTensor]]:
    sizes = [
        heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    if tensor.shape[0] != sum(sizes):
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name} has {tensor.shape[0]} rows, expected {sum(sizes)} for q, k and v; "
            "the file is damaged, download it again"
        )
    row_bytes = tensor.num_bytes // tensor.shape[0]
    parts, offset = [], tensor.offset
    for name, size in zip("qkv", sizes, strict=True):
        part = GgufTensor(
            tensor.name, tensor.file, tensor.type_name, (size, *tensor.shape[1:]), offset, size * row_bytes
        )
        parts.append((f"{prefix}.{name}_proj.{kind}", part))
        offset += part.num_bytes
    return parts


def _gguf_name(name: str) -> str:
    """What a GGUF file calls the tensor that we call `name`."""
    for theirs, ours in _WHOLE.items():
        if name == ours:
            return theirs
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    expert = re.fullmatch(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", rest)
    rest = f"mlp.experts.{expert[1]}_proj" if expert else rest
    return next((f"blk.{prefix}.{theirs}" for theirs, ours in _OF_LAYER.items() if rest == ours), name)


# ---- formats that are re-encoded as Q8_0: blocks of {f16 scale; i8 q[32]} ----

_IQ4_NL_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _nibbles(packed: U8) -> U8:
    """[blocks, 16] bytes → [blocks, 32]: low nibbles are weights 0-15."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=1)


def _fifth_bits(packed: U8) -> U8:
    """[blocks, 4] bytes → [blocks, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _with_scale(scale_bytes: U8, q: npt.NDArray[np.int8]) -> U8:
    return np.concatenate([scale_bytes, q.view(np.uint8)], axis=1).reshape(-1)


def _recode_q5_0(raw: U8) -> U8:
    blocks = raw.reshape(-1, 22)
    q = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return _with_scale(blocks[:, :2], q)


def _recode_iq4_nl(raw: U8) -> U8:
    blocks = raw.reshape(-1, 18)
    return _with_scale(blocks[:, :2], _IQ4_NL_VALUES[_nibbles(blocks[:, 2:])])


def _recode_with_minimum(blocks: U8, q: U8) -> U8:
    """scale * q + minimum, both at the block's beginning, rounded to 127 steps of the largest magnitude."""
    scale_and_minimum = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number stays none
        values = scale_and_minimum[:, :1] * q + scale_and_minimum[:, 1:]
        scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127.0)).astype(np.float16)
        wide = scale.astype(np.float32)
        steps = np.divide(values, wide, out=np.zeros_like(values), where=wide != 0)
        rounded = np.nan_to_num(np.clip(np.rint(steps), -127, 127)).astype(np.int8)
    return _with_scale(scale.view(np.uint8), rounded)


def _recode_q4_1(raw: U8) -> U8:
    blocks = raw.reshape(-1, 20)
    return _recode_with_minimum(blocks, _nibbles(blocks[:, 4:]))


def _recode_q5_1(raw: U8) -> U8:
    blocks = raw.reshape(-1, 24)
    return _recode_with_minimum(blocks, _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]))


_RECODERS: Final[Mapping[str, Callable[[U8], U8]]] = MappingProxyType(
    {"Q5_0": _recode_q5_0, "IQ4_NL": _recode_iq4_nl, "Q4_1": _recode_q4_1, "Q5_1": _recode_q5_1}
)
