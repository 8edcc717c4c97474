"""`twofold pack` and --packed-cache: a packed model is the model, bit for bit; whatever else is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, ModelLoadError, TwofoldError
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.engine import Engine, packing
from twofold.engine.packing import pack_directory
from twofold.models.model_files import open_model_files
from twofold.tools.cli.main import main
from twofold.weights import panel_file, panel_writing
from twofold.weights.panel_file import PANEL_FILE, PREFIX, read_contents

from tests.kernels.memory_nodes import needs_two, two_nodes
from tests.models.gguf_encoders import encode
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import FULL, SLIDING, linear_layers, tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model
from tests.weights.fp8_models import write_both

PROMPT = tuple(range(5, 45))
WIDE = TinyModel(
    hidden_size=256, head_dim=64, moe_intermediate_size=256, num_layers=2, num_experts=4, vocab_size=512
)


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


def pack(source: Path, output: Path, pool: ops.ThreadPool) -> Path:
    assert pack_directory(open_model_files(source), source, output, pool)
    return output


def answer(model: Path, **settings: Any) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log probabilities, which are the logits' to the last bit."""
    config = EngineConfig(**{"model": str(model), "accelerator": "none", "cpu_threads": 2, **settings})
    engine = Engine.load(config)
    tokens: list[int] = []
    found: list[float] = []

    def take(chunk: Any) -> None:
        tokens.extend(chunk.token_ids)
        found.extend(each.logprob for each in chunk.logprobs)

    engine.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0), take)
    engine.close()
    return tokens, found


def gguf_of(type_name: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        matrices = lambda name: type_name if name.startswith("blk") and "norm" not in name else "F32"  # noqa: E731
        k_quants = encode if type_name.endswith("_K") else None
        return write_tiny_gguf(root / "m.gguf", WIDE, type_of=matrices, encode=k_quants)

    return write


def hf(model: TinyModel) -> Callable[[Path], Path]:
    return lambda root: write_tiny_model(root / "hf", model)


MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3-bf16-tied": hf(TinyModel(dtype="bfloat16", tie_word_embeddings=True, mlp_only_layers=(1,))),
    "qwen3-f16-bias": hf(TinyModel(dtype="float16", attention_bias=True)),
    "qwen3-fp8": lambda root: write_both(root, WIDE)[0],
    "mixtral": hf(TinyModel(architecture="MixtralForCausalLM")),
    "deepseek-v3": hf(tiny("deepseek_v3", dtype="bfloat16")),
    "qwen2": hf(tiny("qwen2_moe", dtype="bfloat16")),
    "qwen2-gguf": lambda root: write_tiny_gguf(root / "m.gguf", tiny("qwen2_moe")),
    "ernie": hf(tiny("ernie4_5_moe", dtype="bfloat16")),
    "minimax": hf(tiny("minimax_m2", dtype="bfloat16")),
    "granite": hf(tiny("granitemoe-shared", dtype="bfloat16", shared_intermediate_size=40)),
    "llama4": hf(tiny("llama4", dtype="bfloat16", num_experts=9)),
    "lfm2": hf(tiny("lfm2_moe", dtype="bfloat16")),
    "gemma4": hf(tiny("gemma4", dtype="bfloat16")),
    "gemma4-shared": hf(
        tiny(
            "gemma4-small",
            dtype="bfloat16",
            num_layers=4,
            layer_types=[SLIDING, FULL] * 2,
            num_kv_shared_layers=2,
        )
    ),
    "olmoe": hf(tiny("olmoe", dtype="bfloat16")),
    "gpt-oss": hf(tiny("gpt_oss", dtype="bfloat16")),
    "gpt-oss-mxfp4": hf(
        tiny("gpt_oss", dtype="bfloat16", hidden_size=64, moe_intermediate_size=96, mxfp4=True)
    ),
    "glm": hf(tiny("glm4_moe", dtype="bfloat16", use_qk_norm=True)),
    "qwen3-next": hf(tiny("qwen3_next", dtype="bfloat16", num_layers=2, layer_types=linear_layers(2, 1))),
    "qwen3.5-gguf": lambda root: write_tiny_gguf(
        root / "m.gguf", tiny("qwen3_5_moe", num_layers=2, layer_types=linear_layers(2, 1))
    ),
    "deepseek-v3-gguf": lambda root: write_tiny_gguf(root / "m.gguf", tiny("deepseek_v3")),
    "deepseek-v2-plain-queries": hf(tiny("deepseek_v2", q_lora_rank=None)),
    **{f"gguf-{name}": gguf_of(name) for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_0")},
    "mixtral-gguf": lambda root: write_tiny_gguf(
        root / "m.gguf", TinyModel(architecture="MixtralForCausalLM"), one_tensor_per_expert=True
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_unpacked_bit_for_bit(tmp_path: Path, pool: ops.ThreadPool, name: str) -> None:
    source = MODELS[name](tmp_path)
    packed = pack(source, tmp_path / "packed", pool)
    expected = answer(source)
    files = open_model_files(packed)
    assert files.mapped is not None
    if source.is_dir():
        shutil.rmtree(source)
    else:
        source.unlink()
    assert answer(packed) == expected
    emulated = answer(packed, accelerator="emulated:h200-pcie5", gpu_experts_ratio=0.3)
    assert emulated == expected


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, pool: ops.ThreadPool) -> Path:
    root = tmp_path_factory.mktemp("packed")
    return pack(write_tiny_model(root / "hf", TinyModel(dtype="bfloat16")), root / "out", pool)


def overwrite(at: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at, 2 if at < 0 else 0)
            file.write(data)

    return damage


def cut(by: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - by)


def edit_contents(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Edits the contents and fixes the checksum: a deliberate change."""

    def damage(path: Path) -> None:
        import zlib

        raw = path.read_bytes()
        magic, version, _, offset, _num_bytes = PREFIX.unpack(raw[: PREFIX.size])
        text = raw[offset:].replace(old, new, 1)
        assert text != raw[offset:]
        prefix = PREFIX.pack(magic, version, zlib.crc32(text), offset, len(text))
        path.write_bytes(prefix + raw[PREFIX.size : offset] + text)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another file": (overwrite(0, b"GGUF"), "not a file of packed panels"),
    "empty": (lambda path: os.truncate(path, 0), "not a file of packed panels"),
    "shorter than the prefix": (lambda path: os.truncate(path, 20), "not a file of packed panels"),
    "another version": (overwrite(8, b"\x09"), "another Twofold wrote it"),
    "truncated": (cut(1), "truncated"),
    "half of it": (cut(100_000), "truncated"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated or damaged"),
    "huge contents": (overwrite(24, b"\xff" * 8), "at most"),
    "contents changed": (overwrite(-40, b"#"), "it was changed"),
    "no JSON": (edit_contents(b"{", b"["), "cannot be"),
    "beyond the end": (edit_contents(b'"offset": ', b'"offset": 9999999'), "cannot be"),
    "not on a page": (edit_contents(b'"offset": 4096', b'"offset": 4160'), "cannot be"),
    "negative": (edit_contents(b'"offset": ', b'"offset": -'), "cannot be"),
    "unknown format": (edit_contents(b'"bf16"', b'"bf17"'), "no weight format"),
    "other rows": (edit_contents(b'"columns": 48', b'"columns": 49'), "cannot be"),
    "fewer experts": (edit_contents(b'"num_experts": 8', b'"num_experts": 7'), "cannot be"),
    "another build's panels": (edit_contents(b'"layout": "panels', b'"layout": "lanes'), "this build reads"),
    "another model's": (edit_contents(b'"model.layers.0.self_attn.o_proj', b'"model.layers.9.self_attn.o_proj'),
                        "pack this one again"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damages_are_refused_in_words(tmp_path: Path, packed: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    damage(copy / PANEL_FILE)
    with pytest.raises(ModelLoadError, match=words) as refusal:
        answer(copy)
    assert "pack" in str(refusal.value)
    assert str(copy / PANEL_FILE) in str(refusal.value)


def test_a_changed_weight_is_refused_by_every_command(
    tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, stretch in read_contents(packed / PANEL_FILE).stretches():
        copy = Path(shutil.copytree(packed, tmp_path / "copy", dirs_exist_ok=True)) / PANEL_FILE
        overwrite(stretch.offset, bytes([copy.read_bytes()[stretch.offset] ^ 1]))(copy)
        assert main(["generate", str(copy.parent), "--prompt", "x", "--accelerator", "none"]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert f"{copy}: {name} have CRC" in printed
        assert "pack the model again" in printed


def test_a_file_is_compared_once_after_it_was_copied(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr(
        panel_file, "check_stretches", lambda path, contents: compared.append(contents.panels_end)
    )
    expected = answer(packed)
    assert not compared, "as it was packed"
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    os.utime(copy / PANEL_FILE)
    assert answer(copy) == expected == answer(copy)
    assert len(compared) == 1
    (copy / PANEL_FILE).touch()
    monkeypatch.setattr(os, "utime", _raise(OSError(30, "Read-only file system")))
    assert answer(copy) == expected == answer(copy)
    assert len(compared) == 3


def test_another_configuration_is_refused(tmp_path: Path, packed: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(
        config.replace('"moe_intermediate_size": 24', '"moe_intermediate_size": 32')
    )
    with pytest.raises(ModelLoadError, match="expected"):
        answer(copy)


def test_every_stretch_is_checked(tmp_path: Path, packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(packed), "--check"]) == 0
    contents = read_contents(packed / PANEL_FILE)
    for name, stretch in contents.stretches():
        copy = tmp_path / "copy"
        shutil.copy(packed / PANEL_FILE, copy)
        overwrite(stretch.end - 1, bytes([copy.read_bytes()[stretch.end - 1] ^ 1]))(copy)
        assert main(["pack", str(copy), "--check"]) == 2
        assert f"{name} have CRC" in " ".join(capsys.readouterr().err.split())


def test_the_directory_is_whole_or_not_there(
    tmp_path: Path, pool: ops.ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_model(tmp_path / "hf", TinyModel(dtype="bfloat16"))
    files, out = open_model_files(source), tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(packing, "check_room", lambda *_: None)
        full.setattr(panel_writing.os, "fsync", _raise(OSError(28, "No space left on device")))
        with pytest.raises(TwofoldError, match="No space left"):
            pack_directory(files, source, out, pool)
    assert not list(out.glob(f"{PANEL_FILE}*"))
    shutil.rmtree(out)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="are free"):
            pack_directory(files, source, out, pool)
    (out / f"{PANEL_FILE}.part").write_bytes(b"of a killed run")
    assert pack_directory(files, source, out, pool)
    assert not (out / f"{PANEL_FILE}.part").exists()
    before = (out / PANEL_FILE).stat()
    assert not pack_directory(files, source, out, pool), "it is there already"
    after = (out / PANEL_FILE).stat()
    # Reading moves st_atime, so the whole of stat may differ.
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(ConfigError, match="packed already"):
        pack_directory(open_model_files(out), out, tmp_path / "again", pool)
    other = write_tiny_model(tmp_path / "other", TinyModel())
    with pytest.raises(ConfigError, match="holds hf packed from other files"):
        pack_directory(open_model_files(other), other, out, pool)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"letter\.txt"):
        pack_directory(files, source, tmp_path / "full", pool)
    with panel_writing.PanelFileWriter(tmp_path / "full" / PANEL_FILE):
        (tmp_path / "full" / "letter.txt").unlink()
        with pytest.raises(ConfigError, match="another process"):
            pack_directory(files, source, tmp_path / "full", pool)


def _raise(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


class TestPackedCache:
    def test_hit_miss_and_changed_source(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, cache = MODELS["gguf-Q4_0"](tmp_path), tmp_path / "cache"
        expected = answer(source)
        assert answer(source, packed_cache=str(cache)) == expected
        (first,) = cache.iterdir()
        written = first.stat().st_mtime_ns
        with monkeypatch.context() as hit:
            hit.setattr(ops, "PackedMatrix", _OnlyFromFile)
            assert answer(source, packed_cache=str(cache)) == expected
        assert first.stat().st_mtime_ns == written
        os.utime(source, ns=(1, 1))  # as a new download has another time
        assert answer(source, packed_cache=str(cache)) == expected
        assert len(list(cache.iterdir())) == 2
        os.truncate(first, 1000)
        os.utime(source, ns=(2, 2))
        caplog.clear()
        assert answer(source, packed_cache=str(cache)) == expected

    def test_a_damaged_file_is_rewritten(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        source, cache = MODELS["mixtral"](tmp_path), tmp_path / "cache"
        expected = answer(source, packed_cache=str(cache))
        (first,) = cache.iterdir()
        os.truncate(first, 1000)
        assert answer(source, packed_cache=str(cache)) == expected
        assert "writing it again" in caplog.text
        assert first.stat().st_size > 1000
        caplog.clear()
        stretch = read_contents(first).experts.stretches[-1]
        overwrite(stretch.offset, bytes([first.read_bytes()[stretch.offset] ^ 1]))(first)
        assert answer(source, packed_cache=str(cache)) == expected
        assert f"{first}: experts of layer" in caplog.text
        assert "writing it again" in caplog.text

    def test_without_room_the_model_is_loaded(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = MODELS["mixtral"](tmp_path)
        expected = answer(source)
        (tmp_path / "file").write_text("")
        assert answer(source, packed_cache=str(tmp_path / "file")) == expected
        assert "loaded without it" in caplog.text
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        assert answer(source, packed_cache=str(tmp_path / "cache")) == expected
        assert "are free" in caplog.text
        assert not list((tmp_path / "cache").iterdir())


class _OnlyFromFile:
    """Stands for PackedMatrix where nothing is to be packed."""

    from_file = ops.PackedMatrix.from_file


@needs_two
def test_several_memory_nodes_copy(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(packed)
    root, made = two_nodes(tmp_path), ops.ThreadPool
    monkeypatch.setattr(ops, "ThreadPool", lambda threads, numa: made(threads, "auto", root))
    assert answer(packed) == expected
    assert "panels are copied" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_a_second_process_shares(tmp_path: Path, pool: ops.ThreadPool) -> None:
    """60 MB of panels, private in neither of two processes."""
    model = replace(WIDE, num_experts=64, moe_intermediate_size=512)
    packed = pack(write_tiny_model(tmp_path / "hf", model), tmp_path / "out", pool)
    code = (
        "import sys; from twofold.blocks.panels import MappedPanels; from pathlib import Path\n"
        f"p = MappedPanels(Path({str(packed / PANEL_FILE)!r})); p.mapping.populate(0, p.mapping.bytes)\n"
        "store = p.experts(); print(p.mapping.resident_bytes(0, p.mapping.bytes), flush=True); sys.stdin.read()"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        size = (packed / PANEL_FILE).stat().st_size
        assert size > 60e6
        for process in processes:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == size
        for process in processes:
            pss, private = panels_memory(process.pid, packed / PANEL_FILE)
            assert private == 0
            assert pss <= 0.51 * size
    finally:
        for process in processes:
            process.communicate()


def panels_memory(pid: int, path: Path) -> tuple[int, int]:
    """(proportional, private) bytes of a file's pages in a process."""
    found = dict.fromkeys(("Pss", "Private_Clean", "Private_Dirty"), 0)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split(" ")[0] and value.count(" ") != 1:
            inside = line.endswith(str(path))
        elif inside and key in found:
            found[key] += int(value.split()[0]) * 1024
    return found["Pss"], found["Private_Clean"] + found["Private_Dirty"]


def test_health_reports_the_residents(packed: Path) -> None:
    engine = Engine.load(EngineConfig(model=str(packed), accelerator="none", cpu_threads=1))
    engine.close()
    weights = engine.mapped_weights
    assert weights is not None
    assert (
        0 <= weights.resident_bytes <= weights.mapped_bytes == read_contents(packed / PANEL_FILE).panels_end
    )
