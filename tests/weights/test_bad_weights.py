"""A NaN or an infinity in any tensor is refused while the model loads, with the file and the tensor named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.engine.packing import pack_directory
from twofold.models.model_files import open_model_files
from twofold.tools.cli.main import main
from twofold.weights.weight_format import FORMATS, WeightMatrix, element_type, scale_grid, source_row_bytes

from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

SMALL = TinyModel(num_layers=2, num_experts=2, vocab_size=320)
FAMILIES = {
    "qwen3": replace(SMALL, dtype="bfloat16"),
    "f16": replace(SMALL, dtype="float16", tie_word_embeddings=True),
    "deepseek": tiny("deepseek_v3", num_layers=2),
    "gpt-oss": tiny("gpt_oss", num_layers=2),
    "qwen3-next": tiny("qwen3_next", has_mtp=False),
}
BAD = {"F32": 0x7F800000, "F16": 0xFE01, "BF16": 0xFF80}


def load(path: Path) -> None:
    Engine.load(EngineConfig(model=str(path), accelerator="none", cpu_threads=2)).close()


@pytest.mark.parametrize("name", FAMILIES)
def test_each_tensor_is_named(tmp_path: Path, name: str) -> None:
    directory = write_tiny_model(tmp_path, FAMILIES[name])
    load(directory)
    tensors = open_model_files(directory).tensors
    for tensor in tensors:
        entry = tensors.entry(tensor)
        kind = np.uint32 if entry.dtype == "F32" else np.uint16
        with entry.file.open("r+b") as stream:
            stream.seek(entry.offset + entry.num_bytes - kind().itemsize)
            sound = stream.read(kind().itemsize)
            stream.seek(-len(sound), 1)
            stream.write(kind(BAD[entry.dtype]).tobytes())
            stream.flush()
            with pytest.raises(ModelLoadError) as refused:
                load(directory)
            stream.seek(-len(sound), 1)
            stream.write(sound)
        message = str(refused.value)
        assert message.startswith(f"{entry.file}: tensor {tensor}"), message
        assert "holds a NaN or an infinity" in message
        assert message.endswith("the file is damaged, download it again")
    load(directory)


def edited(edit: Callable[[np.ndarray], None], type_name: str, tensor: str, tmp_path: Path) -> Path:
    wide = TinyModel(hidden_size=256, head_dim=64, moe_intermediate_size=256, num_layers=2, num_experts=2)
    types = lambda name: type_name if name == tensor else "F32"  # noqa: E731
    path = write_tiny_gguf(tmp_path / "m.gguf", wide, type_of=types)
    files = open_model_files(path)
    entry = next(e for e in map(files.tensors.entry, files.tensors) if e.dtype == type_name)
    data = np.memmap(path, np.uint8, "r+")
    edit(data[entry.offset : entry.offset + entry.num_bytes])
    data.flush()
    return path


@pytest.mark.parametrize(("type_name", "scale_bytes"), [("Q8_0", 34), ("Q4_0", 18)])
def test_a_scale_of_a_gguf_expert_is_named(tmp_path: Path, type_name: str, scale_bytes: int) -> None:
    def edit(raw: np.ndarray) -> None:
        raw[-scale_bytes + 1] = 0x7C

    path = edited(edit, type_name, "blk.1.ffn_down_exps.weight", tmp_path)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor \S+down_proj\S*, matrix 1: row 255 of its q"):
        load(path)


def test_the_command_ends_with_code_2_and_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def edit(raw: np.ndarray) -> None:
        raw[1] = 0x7C

    path = edited(edit, "Q8_0", "blk.0.ffn_up_exps.weight", tmp_path)
    assert main(["generate", str(path), "--prompt", "x", "--accelerator", "none"]) == 2
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert "row 0 of its q8_0 matrix holds a NaN or an infinity" in printed
    assert main(["pack", str(path), str(tmp_path / "packed")]) == 2
    assert "row 0 of its q8_0 matrix holds a NaN or an infinity" in capfd.readouterr().err


def test_packing_refuses_rows_of_an_embedding_that_no_matrix_is_packed_from(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", SMALL)
    entry = open_model_files(directory).tensors.entry("model.embed_tokens.weight")
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(np.float32(np.nan).tobytes())
    with pytest.raises(ModelLoadError, match=r"tensor model\.embed_tokens\.weight: row 0"):
        pack_directory(open_model_files(directory), directory, tmp_path / "packed", ops.ThreadPool(1))


@pytest.mark.parametrize("part", ["table", "vocabulary"])
def test_a_copy_for_a_device_is_checked(tmp_path: Path, part: str) -> None:
    import torch
    from twofold.device.model import TorchWeights

    directory = write_tiny_model(tmp_path, FAMILIES["qwen3"])
    files = open_model_files(directory)
    weights = files.embedding if part == "table" else files.head
    TorchWeights(weights, ops.ThreadPool(1), torch.device("cpu")).matrix(part)
    entry = files.tensors.entry(weights.specs[part].name)
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(np.uint16(BAD["BF16"]).tobytes())
    with pytest.raises(ModelLoadError, match=rf"safetensors: tensor {entry.name}: row 0"):
        TorchWeights(weights, ops.ThreadPool(1), torch.device("cpu")).matrix(part)


@pytest.mark.parametrize("format", FORMATS)
def test_packing_refuses_what_dequantises_to_no_number(format: str) -> None:
    """Rows of random bytes, of which each panel has one that is not finite, or none."""
    pool, rng = ops.ThreadPool(1), np.random.default_rng(7)
    rows, columns = 40, 512
    layout = FORMATS[format]
    refusals = 0
    for trial in range(60):
        # Bit 2 is in the exponent of every float, so without it none is a NaN or an infinity.
        raw = rng.integers(0, 256, (rows, source_row_bytes(format, columns)), np.uint8) & np.uint8(0xFB)
        if format == "nvfp4":
            raw[:, :4] = np.frombuffer(np.float32(1.0).tobytes(), np.uint8)
        if trial % 2:
            at = 2 if format == "nvfp4" else rng.integers(min(raw.shape[1], 4 + layout.block_bytes))
            raw[rng.integers(rows), at : at + 2] |= 0x7F
            raw[rng.integers(rows)] |= np.uint8(0x7C * (trial % 6 == 5))
        grid = scale_grid((rows, columns))
        scales = np.ones(grid, np.float32) if layout.scale_grid else None
        if scales is not None and trial % 8 == 7:
            scales[0, rng.integers(grid[1])] = np.inf
        matrix = WeightMatrix(raw.view(element_type(format)), format, columns, scales)
        values = ops.dequantise(pool, matrix)
        sound = bool(np.isfinite(values).all())
        if format == "mxfp4":  # its NaN is a power of two to dequantise
            sound = not (raw.reshape(rows, -1, 17)[..., 0] == 0xFF).any()
        if sound:
            _core.pack_panels(matrix)
            ops.expect_finite(pool, matrix)
            continue
        refusals += 1
        first = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0]) if format != "mxfp4" else None
        with pytest.raises(ValueError, match="holds a NaN or an infinity") as refused:
            _core.pack_panels(matrix)
        assert first is None or str(refused.value).startswith(f"row {first} of its {format} matrix")
    assert refusals > 3
