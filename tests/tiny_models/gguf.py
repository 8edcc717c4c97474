"""Tiny random models as GGUF files with the weights of `tests.tiny_models.writing`, written by the `gguf` package.

Nothing here is used to serve a model.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf_keys import add_keys
from tests.tiny_models.gguf_tensors import tiny_gguf_weights
from tests.tiny_models.writing import (
    CHATML_TEMPLATE,
    SPECIAL_TOKENS,
    TinyModel,
    write_tiny_tokenizer,
)

F32 = npt.NDArray[np.float32]

_FLOATS: Final = ("ffn_gate_inp", "conv1d", "conv.conv")
"""Name parts of matrices that converters leave in float32."""


def write_tiny_gguf(
    path: str | Path,
    model: TinyModel | None = None,
    *,
    type_of: Callable[[str], str] = lambda name: "F32",
    encode: Callable[[F32, str], npt.NDArray[Any]] | None = None,
    split_tensors: int = 0,
    one_tensor_per_expert: bool = False,
    split_kv: bool = True,
    vocabulary: Literal["gpt2", "llama"] = "gpt2",
    edit: Callable[[Any], None] | None = None,
) -> Path:
    """Write `model` to `path`; with `split_tensors` in parts of so many tensors. Returns the (first) file.

    `type_of` chooses a matrix's type by its GGUF name; vectors and routers stay F32. `encode(values, type)` gives
    the rows of types that the package itself cannot make. `vocabulary` is the tiny models' byte-level BPE or a
    SentencePiece one. Without `split_kv` DeepSeek's kv_b is one matrix, as in older files. `edit` may change the
    metadata through the package's writer.
    """
    import gguf

    model = model or TinyModel()
    path = Path(path)
    writer = gguf.GGUFWriter(path, model.gguf_architecture, split_max_tensors=split_tensors)
    _add_keys(writer, model, split_kv)
    (_add_sentencepiece if vocabulary == "llama" else _add_byte_level)(writer, path.parent)
    if edit is not None:
        edit(writer)
    weights = tiny_gguf_weights(model, one_tensor_per_expert=one_tensor_per_expert, split_kv=split_kv)
    for name, values in weights.items():
        stays = values.ndim == 1 or name.endswith(".bias") or any(part in name for part in _FLOATS)
        kind = "F32" if stays else type_of(name)
        if kind == "F32":
            writer.add_tensor(name, values)
            continue
        type_ = gguf.GGMLQuantizationType[kind]
        rows = gguf.quantize(values, type_) if encode is None else encode(values, kind)
        writer.add_tensor(name, np.ascontiguousarray(rows), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return parts[0] if parts else path


def _add_keys(writer: Any, model: TinyModel, split_kv: bool) -> None:
    import gguf

    mixtral = model.architecture == "MixtralForCausalLM"
    writer.add_block_count(model.num_gguf_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_feed_forward_length(model.moe_intermediate_size if mixtral else model.intermediate_size)
    if model.has_experts:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(model.top_k)
    if model.has_experts and not mixtral:
        writer.add_expert_feed_forward_length(model.moe_intermediate_size)
        printed = model.config().get("norm_topk_prob")
        if printed is not None and (not printed or model.gguf_architecture != "qwen3moe"):
            writer.add_expert_weights_norm(printed)
    if isinstance(model, TinyFamily):
        add_keys(model, writer, gguf, split_kv=split_kv)
        return
    writer.add_rope_freq_base(model.rope_theta)
    if mixtral:
        writer.add_rope_dimension_count(model.head_dim)
    if model.sliding_window is not None:
        writer.add_sliding_window(model.sliding_window)


def _add_byte_level(writer: Any, directory: Path) -> None:
    """The tokenizer that `write_tiny_tokenizer` writes."""
    write_tiny_tokenizer(directory)
    vocabulary = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML_TEMPLATE)


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a SentencePiece BPE vocabulary, learned here from a few words."""
    words = [f"▁{word}" for word in _WORDS.split()]
    pieces = [list(word) for word in words]
    learned: list[str] = []
    for _ in range(40):
        counts: dict[tuple[str, str], int] = {}
        for parts in pieces:
            for pair in itertools.pairwise(parts):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        learned.append(left + right)
        for parts in pieces:
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == (left, right):
                    parts[at : at + 2] = [left + right]
                at += 1
    learned = list(dict.fromkeys(learned))
    letters = sorted(set("".join(words)) | set("ABCDEFGHIJKLMNOPQRSTUVWXYZ,.!?0123456789"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned, *letters]
    types = [2, 3, 3, *([6] * 256), *([1] * (len(learned) + len(letters)))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(learned) + len(letters))]
    return tokens, types, scores


_WORDS: Final = (
    "once upon a time there was a king who had three daughters and the youngest was so fair that the sun himself "
    "wondered whenever he shone on her the king said to the fox then go and there the children were playing"
)


def _add_sentencepiece(writer: Any, directory: Path) -> None:
    tokens, types, scores = sentencepiece_vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML_TEMPLATE)


def gguf_bytes(
    fields: Mapping[str, tuple[str, Any]], tensors: Sequence[tuple[str, Sequence[int], int, int]], data: bytes
) -> bytes:
    """A GGUF file of exactly this, right or wrong.

    `fields` are (value type, value), with the type "[STRING]" for an array of strings; `tensors` are (name, dimensions,
    type number, offset).
    """
    import gguf

    types = gguf.GGUFValueType

    def string(text: str) -> bytes:
        raw = text.encode()
        return struct.pack("<Q", len(raw)) + raw

    def scalar(kind: str, value: Any) -> bytes:
        return string(value) if kind == "STRING" else struct.pack(f"<{_PACKED_AS[kind]}", value)

    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
    for key, (kind, value) in fields.items():
        element = kind.strip("[]")
        out += string(key)
        if kind == element:
            out += struct.pack("<I", types[kind]) + scalar(kind, value)
        else:
            out += struct.pack("<IIQ", types.ARRAY, types[element], len(value))
            out += b"".join(scalar(element, item) for item in value)
    for name, dimensions, type_number, offset in tensors:
        out += string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        out += struct.pack("<IQ", type_number, offset)
    out += bytes(-len(out) % 32)
    return bytes(out) + data


def gguf_parts(
    path: Path,
) -> tuple[dict[str, tuple[str, Any]], list[tuple[str, Sequence[int], int, int]], bytes]:
    """Arguments from which `gguf_bytes` would write `path`, as read by the gguf package."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kind = field.types[-1].name
        fields[key] = (f"[{kind}]" if len(field.types) > 1 else kind, field.contents())
    tensors: list[tuple[str, Sequence[int], int, int]] = [
        (
            tensor.name,
            [int(size) for size in tensor.shape],
            int(tensor.tensor_type),
            int(tensor.data_offset) - reader.data_offset,
        )
        for tensor in reader.tensors
    ]
    return fields, tensors, path.read_bytes()[reader.data_offset :]


def with_strange_metadata(
    fields: Mapping[str, tuple[str, Any]],
    tensors: Sequence[tuple[str, Sequence[int], int, int]],
    rng: random.Random,
) -> tuple[dict[str, tuple[str, Any]], list[tuple[str, Sequence[int], int, int]]]:
    """Well-formed nonsense: one to three values, types, sizes or names that a model would not have."""
    fields, tensors = dict(fields), list(tensors)
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.3:
            at = rng.randrange(len(tensors))
            name, dimensions, type_number, offset = tensors[at]
            sizes = list(dimensions)
            sizes[rng.randrange(len(sizes))] = rng.choice((1, 16, 24, 32, 64, 256, 2**20))
            tensors[at] = rng.choice(
                (
                    (name, sizes, type_number, offset),
                    (name, dimensions, rng.randrange(45), offset),
                    (name, dimensions, type_number, rng.randrange(0, 2**16, 32)),
                    (rng.choice(tensors)[0] + rng.choice(("", "x")), dimensions, type_number, offset),
                    (name, [*dimensions, 1], type_number, offset),
                )
            )
            continue
        key = rng.choice(list(fields))
        kind, value = fields[key]
        if rng.random() < 0.2:
            del fields[key]
            if not fields:
                break
        elif kind.startswith("[") and rng.random() < 0.7 and value:
            items = list(value)
            at = rng.randrange(len(items))
            items[at] = _strange_value(kind.strip("[]"), rng)
            fields[key] = (kind, items[: rng.choice((len(items), len(items), at, at + 1))])
        else:
            new_kind = rng.choice(
                (kind.strip("[]"), kind.strip("[]"), rng.choice(list(_PACKED_AS)), "STRING")
            )
            fields[key] = (new_kind, _strange_value(new_kind, rng))
    return fields, tensors


def _strange_value(kind: str, rng: random.Random) -> Any:
    if kind == "STRING":
        return rng.choice(
            (
                "",
                " ",
                "a",
                "\0",
                "a b",
                "x" * 1000,
                "Ġ",
                "▁",
                "{{",
                "{% for %}",
                "<|im_end|>",
                "gpt2",
                "llama",
                "default",
                "tekken",
                "yarn",
                "qwen3moe",
            )
        )
    if kind == "BOOL":
        return rng.random() < 0.5
    if kind.startswith("FLOAT"):
        return rng.choice((0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"), 2.0))
    bits = 8 * struct.calcsize(_PACKED_AS[kind])
    value = rng.choice(_STRANGE) % 2**bits
    return value - 2**bits if kind.startswith("INT") and value >= 2 ** (bits - 1) else value


_PACKED_AS: Final = {
    "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q",
    "FLOAT32": "f", "FLOAT64": "d", "BOOL": "?",
}  # fmt: skip
_STRANGE: Final = (
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 63, 64, 255, 2**15, 2**16, 2**20, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1),
)


def damaged(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """`data` with one to four things wrong, most of them in the first `header_bytes`; always the same for one `rng`."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = min(len(changed), header_bytes) if rng.random() < 0.95 else len(changed)
        if end < 9:
            break
        at = rng.randrange(end - 8)
        kind = rng.randrange(8)
        if kind == 0:
            del changed[rng.randrange(len(changed)) :]
        elif kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[at] = rng.randrange(256)
        elif kind in (3, 4):
            width = rng.choice((4, 8))
            changed[at : at + width] = (rng.choice(_STRANGE) % 256**width).to_bytes(width, "little")
        elif kind == 5:
            del changed[at : at + rng.randrange(1, 64)]
        elif kind == 6:
            changed[at:at] = rng.randbytes(rng.randrange(1, 32))
        else:
            source = rng.randrange(end - 8)
            changed[at : at + 16] = changed[source : source + 16]
    return bytes(changed)
