"""Writes a random model of a real shape as one GGUF file, tensor by tensor: memory holds one matrix stack at a time.

Everything is in the asked format, embedding and output too, except what GGUF always keeps in F32 (norms, routers,
biases), and what `TensorMaker` makes Q8_0. The tokenizer is 256 byte tokens and fillers up to the vocabulary's size.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from twofold.text.tokenizer.pieces import character_of_byte

from benchmarks.models.family_tensors import FAMILIES, Tensor, TensorMaker, mixed_streams, tensors_of_layer
from benchmarks.models.random_blocks import GGUF_FORMATS, random_rows, row_bytes
from benchmarks.models.shapes import FullShape

if TYPE_CHECKING:
    import gguf

_CHUNK_BYTES: Final = 64 * 1024**2
_FREE_BYTES: Final = 2 * 1024**3
"""Bytes that must stay free on the disk."""
_WEIGHTS_VERSION: Final = 2
"""Grows when other weights are written for the same seed, so that no older file of a cache is taken for them."""


def tensors_of(shape: FullShape, format_name: str) -> list[Tensor]:
    """Every tensor of the file, in the order of the file. ValueError for an unknown format or rows it cannot hold."""
    if format_name not in GGUF_FORMATS:
        raise ValueError(f"format {format_name!r} is unknown; one of {', '.join(GGUF_FORMATS)}")
    make = TensorMaker(format_name)
    layers = (
        replace(tensor, name=f"blk.{layer}.{tensor.name}")
        for layer in range(shape.layers)
        for tensor in tensors_of_layer(shape, layer, make)
    )
    ends = [] if shape.stream_rank else [make.norm("output_norm", shape.hidden)]
    if shape.streams:
        ends += mixed_streams(shape, "output_hc", make)
    return [
        make.dense("token_embd", shape.hidden, shape.vocab),
        *layers,
        *ends,
        make.dense("output", shape.hidden, shape.vocab),
    ]


def model_bytes(shape: FullShape, format_name: str) -> int:
    """Bytes of all tensors; the header and the vocabulary add a few megabytes."""
    return sum(tensor.bytes for tensor in tensors_of(shape, format_name))


def file_name(shape: FullShape, format_name: str, seed: int) -> str:
    return f"{shape.name}-{shape.layers}l-{format_name}-s{seed}-v{_WEIGHTS_VERSION}.gguf"


@contextlib.contextmanager
def cached_model(
    directory: Path, shape: FullShape, format_name: str, seed: int = 0, *, keep: bool = True
) -> Iterator[Path]:
    """The file of a random model under `directory`, written if it is missing; without `keep` a new one is deleted.

    Raises as `write_model`, and ValueError without the gguf package.
    """
    path = directory / file_name(shape, format_name, seed)
    is_new = not path.exists()
    try:
        if is_new:
            print(f"writing {path.name}", file=sys.stderr, flush=True)
            write_model(path, shape, format_name, seed)
        yield path
    except ImportError as error:
        raise ValueError(f"{error}; install it: pip install 'twofold[peers]'") from error
    finally:
        if is_new and not keep:
            path.unlink(missing_ok=True)


def write_model(
    path: Path,
    shape: FullShape,
    format_name: str,
    seed: int = 0,
    *,
    is_sparse: bool = False,
) -> None:
    """Write the file; it appears under its name only when it is whole.

    is_sparse: headers alone, then holes of the right size: for sizes, not for running.

    Raises:
        ValueError: the format cannot hold this shape.
        OSError: the disk has no room for it, or cannot be written.
    """
    import gguf

    tensors = tensors_of(shape, format_name)
    whole = sum(tensor.bytes for tensor in tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < whole + _FREE_BYTES and not is_sparse:
        raise OSError(
            f"{path.name} takes {whole / 1e9:.1f} GB, {path.parent} has {free / 1e9:.1f} GB free and "
            f"{_FREE_BYTES / 1e9:.1f} GB are to stay free; give another directory or fewer layers"
        )
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, shape.architecture)
    try:
        _add_metadata(writer, shape, format_name)
        _write_headers(writer, tensors)
        rng = np.random.Generator(np.random.SFC64(seed))
        for tensor in tensors:
            # One file, written piece by piece: write_tensor_data would want the whole stack in memory.
            out = writer.fout[0]
            writer.write_padding(out, out.tell())
            if is_sparse:
                out.truncate(out.seek(tensor.bytes, os.SEEK_CUR))
            for piece in () if is_sparse else _pieces(rng, tensor):
                out.write(piece.data)
            writer.write_padding(out, tensor.bytes)
        writer.flush()
        # Written to the disk before read times are measured.
        os.fsync(writer.fout[0].fileno())
        writer.close()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_headers(writer: gguf.GGUFWriter, tensors: list[Tensor]) -> None:
    import gguf

    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.byte_shape,
            np.dtype(np.uint8),
            tensor.bytes,
            raw_dtype=gguf.GGMLQuantizationType[tensor.block_format.gguf_type],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _pieces(rng: np.random.Generator, tensor: Tensor) -> Iterator[npt.NDArray[Any]]:
    if tensor.fill is not None:
        yield np.full(tensor.columns, tensor.fill, np.float32).view(np.uint8)
        return
    rows_at_once = max(1, _CHUNK_BYTES // row_bytes(tensor.block_format, tensor.columns))
    for first in range(0, tensor.all_rows, rows_at_once):
        rows = min(rows_at_once, tensor.all_rows - first)
        yield random_rows(rng, tensor.block_format, rows, tensor.columns)


def _add_metadata(writer: gguf.GGUFWriter, shape: FullShape, format_name: str) -> None:
    import gguf

    writer.add_name(f"random {shape.name}, {shape.layers} layers")
    # llama.cpp shows the file type and computes by each tensor's own.
    name = re.compile(rf"(ALL|MOSTLY)_{GGUF_FORMATS[format_name].gguf_type}(_S|_MOE)?")
    writer.add_file_type(next(kind for kind in gguf.LlamaFileType if name.fullmatch(kind.name)))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.dense or shape.intermediate)
    writer.add_expert_feed_forward_length(shape.intermediate)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.heads)
    latent = shape.latent  # which is one head for all queries
    writer.add_head_count_kv(1 if latent else shape.kv_heads)
    writer.add_key_length(latent.kv_rank + latent.rope if latent else shape.head_dim)
    writer.add_value_length(latent.kv_rank if latent else shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    FAMILIES[shape.architecture].write_keys(writer, shape)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    tokens, types = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(FAMILIES[shape.architecture].word_rule)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(shape.vocab - 1)
    writer.add_pad_token_id(shape.vocab - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens and their GGUF types: 256 bytes as GPT-2 writes them, one merge, fillers and an end. Needs 300 or more."""
    if size < 300:
        raise ValueError(f"a vocabulary of {size} was asked for; it takes 300 or more")
    normal, control, unused = 1, 3, 5
    letters = character_of_byte()
    tokens = [*(letters[byte] for byte in range(256)), "Ġt"]
    types = [normal] * len(tokens)
    fillers = size - len(tokens) - 1
    tokens += [f"[filler {index}]" for index in range(fillers)]
    types += [unused] * fillers
    return [*tokens, "<|endoftext|>"], [*types, control]
