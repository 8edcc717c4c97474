"""Projector files of llama.cpp: the same rows and places as from the model's Hugging Face checkpoint."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ModelLoadError
from twofold.api.media import PromptMedia
from twofold.api.picture_config import PictureConfig
from twofold.api.types import GenerationRequest, SamplingParams, TokenLogprob
from twofold.engine import Engine
from twofold.models import open_model_files
from twofold.models.picture_encoder import encoder_elements, find_projector
from twofold.tools.cli.main import main
from twofold.vision.encoded import EncodedPicture, PlacedPrompt
from twofold.vision.encoder import PictureEncoder
from twofold.vision.loading import open_encoder
from twofold.vision.mmproj import projector_checkpoint
from twofold.vision.source import picture_source

from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.gguf import (
    damaged,
    gguf_bytes,
    gguf_parts,
    with_strange_metadata,
    write_tiny_gguf,
)
from tests.tiny_models.mmproj import write_projector, write_text_header
from tests.tiny_models.pictures import FAMILIES, encoder_of, picture, write_picture_model
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

COLOURS = {"image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 0.5]}


@dataclass(frozen=True)
class Files:
    """A tiny model in both formats."""

    family: str
    folder: Path
    text: Path
    reference: PictureEncoder

    def settings(self) -> dict[str, Any]:
        """Settings of pictures that projector files cannot say, or that the reference's directory does not."""
        return {"max_soft_tokens": 70} if self.family == "gemma4_e2b" else COLOURS

    def projector(self, name: str, kind: str = "F32", **settings: Any) -> Path:
        return write_projector(self.text.with_name(name), self.folder, self.family, kind, **settings)


@pytest.fixture(
    scope="module", params=["qwen3_5_moe", "qwen3_5", "qwen3_vl_moe", "qwen3_vl", "glm4v_moe", "gemma4_e2b"]
)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp(request.param)
    folder = root / "model"
    write_picture_model(folder, request.param)
    text = write_text_header(root / "text.gguf", folder, request.param)
    return Files(request.param, folder, text, encoder_of(folder))


def encoder_from(projector: Path, text: Path, folder: Path) -> PictureEncoder:
    folder.mkdir(exist_ok=True)
    return PictureEncoder(folder, projector_checkpoint(projector, text, folder))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("F32", 0.0), ("BF16", 0.03), ("F16", 0.005), ("Q8_0", 0.06)]
)
def test_rows_and_places_are_those_of_the_checkpoint(
    files: Files, tmp_path: Path, kind: str, tolerance: float
) -> None:
    encoder = encoder_from(files.projector(f"mmproj-{kind}.gguf", kind), files.text, tmp_path)
    sizes = ((90, 40), (33, 70))
    theirs, ours = (
        [each.prepared(picture(*size), settings) for size in sizes]
        for each, settings in ((files.reference, files.settings()), (encoder, _limits(files)))
    )
    assert [each.text for each in ours] == [each.text for each in theirs]
    expected = files.reference.pictures(theirs)
    made = encoder.pictures(ours)
    for one, other in zip((each.media for each in made), (each.media for each in expected), strict=True):
        assert_close(one.rows, other.rows, tolerance)
        assert (one.deep is None) == (other.deep is None)
        if one.deep is not None and other.deep is not None:
            assert_close(one.deep, other.deep, tolerance)
    text = _prompt(files, made)
    ids: list[int] = encoder.tokenizer(text)["input_ids"]
    assert ids == files.reference.tokenizer(text)["input_ids"]
    placed, known = encoder.placed(ids, made), files.reference.placed(ids, expected)
    assert placed.token_ids == known.token_ids
    assert [(span.begin, span.count) for span in placed.media.spans] == [
        (span.begin, span.count) for span in known.media.spans
    ]
    np.testing.assert_equal(placed.media.rotations, known.media.rotations)


def _limits(files: Files) -> dict[str, Any]:
    return files.settings() if files.family == "gemma4_e2b" else {}


def _prompt(files: Files, pictures: list[EncodedPicture]) -> str:
    before, after = FAMILIES[files.family].around
    return " and ".join(f"{before}{each.text}{after}" for each in pictures)


def assert_close(values: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Equal, or different by less than a share of the largest value."""
    assert values.shape == expected.shape
    if tolerance == 0.0:
        np.testing.assert_array_equal(values, expected)
    else:
        assert 0 < np.abs(values - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projection_dim": 96}, r"rows of 96 values, expected 64, the hidden size of text\.gguf"),
        ({"block_count": 1}, "holds v.blk.1.* more tensors that a .* projector does not have"),
        ({"block_count": None}, "block_count is missing"),
        ({"attention.head_count": 3}, "attention.head_count is 3, expected heads"),
        ({"embedding_length": 64}, r"tensor v\.\S+ makes .*, expected .* from the file's settings"),
        ({"patch_size": 8}, r"tensor v\.\S+ makes .*, expected .* from the file's settings"),
    ],
)
def test_sizes_that_do_not_match_are_named(
    files: Files, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        projector_checkpoint(files.projector("mmproj-wrong.gguf", **change), files.text, tmp_path)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("qwen")
    write_picture_model(root / "model", "qwen3_vl_moe")
    text = write_text_header(root / "text.gguf", root / "model", "qwen3_vl_moe")
    return Files("qwen3_vl_moe", root / "model", text, encoder_of(root / "model"))


def test_files_that_do_not_belong_together_are_refused(qwen: Files, tmp_path: Path) -> None:
    projector = qwen.projector("mmproj.gguf")
    other = write_text_header(tmp_path / "other.gguf", qwen.folder, "gemma4_e2b")
    with pytest.raises(ModelLoadError, match=r"'gemma4'; expected qwen3vlmoe or .*\. Give the projector of"):
        projector_checkpoint(projector, other, tmp_path)
    with pytest.raises(ModelLoadError, match=r"general\.architecture is 'qwen3vlmoe', expected 'clip'"):
        projector_checkpoint(qwen.text, qwen.text, tmp_path)

    def without_pictures(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.tokens")
        writer.add_token_list([f"{n}" for n in range(271)])
        writer.kv_data[0].pop("tokenizer.ggml.merges")
        writer.add_token_merges(["1 0"])

    plain = write_text_header(tmp_path / "plain.gguf", qwen.folder, qwen.family, edit=without_pictures)
    with pytest.raises(
        ModelLoadError, match=r"has no token <\|vision_start\|>, which stands for a picture's parts"
    ):
        projector_checkpoint(projector, plain, tmp_path)


def edited(path: Path, edit: Callable[[dict[str, Any], list[Any]], None]) -> Path:
    """A copy of a GGUF file with other metadata and tensors."""
    fields, tensors, data = gguf_parts(path)
    edit(fields, tensors)
    changed = path.with_name(f"edited-{path.name}")
    changed.write_bytes(gguf_bytes(fields, tensors, data))
    return changed


def test_unknown_projectors_and_tensors_are_named(qwen: Files, tmp_path: Path) -> None:
    projector = qwen.projector("mmproj-f32.gguf")

    def refused(edit: Callable[[dict[str, Any], list[Any]], None], message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            projector_checkpoint(edited(projector, edit), qwen.text, tmp_path)

    def rename(tensors: list[Any], old: str, new: str) -> None:
        at = next(n for n, each in enumerate(tensors) if each[0] == old)
        tensors[at] = (new, *tensors[at][1:])

    kind = {"clip.projector_type": ("STRING", "resampler")}
    refused(
        lambda fields, tensors: fields.update(kind),
        "of type 'resampler', expected one of qwen3vl_merger, glm4v",
    )
    sound = {"clip.has_vision_encoder": ("BOOL", False)}
    refused(lambda fields, tensors: fields.update(sound), "has no vision encoder")
    refused(
        lambda fields, tensors: rename(tensors, "mm.2.bias", "mm.3.bias"), r"tensor mm\.2\.bias is missing"
    )


def test_tensors_of_sound_are_left_out(qwen: Files, tmp_path: Path) -> None:
    projector = qwen.projector("mmproj-f32.gguf")

    def with_sound(fields: dict[str, Any], tensors: list[Any]) -> None:
        end = max(offset for _, _, _, offset in tensors)
        tensors += [("a.blk.0.ln1.weight", [4], 0, end + 2**16), ("mm.a.fc.weight", [4], 0, end + 2**16 + 32)]

    changed = edited(projector, with_sound)
    changed.write_bytes(changed.read_bytes() + bytes(2**17))
    plain, mixed = (projector_checkpoint(each, qwen.text, tmp_path) for each in (projector, changed))
    assert plain.keys() == mixed.keys()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_projectors_are_refused_or_read(qwen: Files, tmp_path: Path, count: int) -> None:
    """Mutations of header bytes and of well-formed values; none raises anything but ModelLoadError."""
    rng = random.Random(11)
    whole = qwen.projector("mmproj-f32.gguf")
    data, parts = whole.read_bytes(), gguf_parts(whole)
    header = len(data) - len(parts[2])
    path, num_read = tmp_path / "mmproj.gguf", 0
    shown = picture(40, 33)
    for turn in range(count):
        if turn % 2:
            fields, tensors = with_strange_metadata(parts[0], parts[1], rng)
            path.write_bytes(gguf_bytes(fields, tensors, parts[2]))
        else:
            path.write_bytes(damaged(data, header, rng))
        try:
            tensors_read = projector_checkpoint(path, qwen.text, tmp_path)
        except ModelLoadError:
            continue
        num_read += 1
        if num_read % 20 == 1:
            encoder = PictureEncoder(tmp_path, tensors_read)
            (made,) = encoder.pictures(
                [encoder.prepared(shown, {"size": {"shortest_edge": 64, "longest_edge": 4096}})]
            )
            assert made.media.rows.shape[1] == 64
    assert count / 20 < num_read < count * 0.95


def with_picture_tokens(writer: Any) -> None:
    """Tokens for pictures in a tiny text's GGUF file, as `write_picture_model` numbers them."""
    fields = writer.kv_data[0]
    further = list(FAMILIES["qwen3_vl_moe"].tokens.values())
    tokens = fields.pop("tokenizer.ggml.tokens").value
    kinds = fields.pop("tokenizer.ggml.token_type").value
    writer.add_token_list([*tokens, *further])
    writer.add_token_types([*kinds, *[3] * len(further)])


def answer_of(model: Path, prompt: PlacedPrompt) -> list[TokenLogprob]:
    found: list[TokenLogprob] = []
    engine = Engine.load(EngineConfig(model=str(model), accelerator="none", max_total_tokens=256))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)
    engine.submit(
        GenerationRequest(
            prompt.token_ids, sampling, lambda chunk: found.extend(chunk.logprobs), "", media=prompt.media
        )
    )
    while engine.step():
        pass
    engine.close()
    return found


def test_an_engine_reads_gguf_files_with_pictures_and_what_is_made_of_them(
    qwen: Files, tmp_path: Path
) -> None:
    """Its answers are those of a directory with the same weights and the rows of its encoder."""
    text = EXAMPLES["qwen3_vl_moe"].resized(hidden_size=64, num_layers=3)
    (tmp_path / "whole").mkdir()
    write_tiny_model(tmp_path / "directory", text)
    whole = write_tiny_gguf(tmp_path / "whole/text.gguf", text.twin, edit=with_picture_tokens)
    write_projector(tmp_path / "whole/mmproj.gguf", qwen.folder, qwen.family)
    assert main(["pack", str(whole), str(tmp_path / "packed")]) == 0
    (before, after), shown = FAMILIES[qwen.family].around, picture(40, 33)

    def asked(encoder: PictureEncoder, settings: dict[str, Any]) -> PlacedPrompt:
        (made,) = encoder.pictures([encoder.prepared(shown, settings)])
        return encoder.placed(encoder.tokenizer(f"see {before}{made.text}{after}")["input_ids"], [made])

    known = asked(qwen.reference, qwen.settings())
    expected = answer_of(tmp_path / "directory", known)
    unseen = answer_of(tmp_path / "directory", replace(known, media=PromptMedia(())))
    assert [token.token_id for token in unseen] != [token.token_id for token in expected]
    for model in (whole, tmp_path / "packed"):
        files = open_model_files(model)
        source = picture_source(PictureConfig(), model, files, threads=1)
        assert source is not None
        assert source.projector == model.with_name("mmproj.gguf") or source.projector == model / "mmproj.gguf"
        assert encoder_elements(files.config, files.tensors) > 0
        prompt = asked(open_encoder(source.model, source.projector, "cpu"), {})
        assert prompt.token_ids == known.token_ids
        for token, other in zip(answer_of(model, prompt), expected, strict=True):
            assert token.token_id == other.token_id
            assert abs(token.logprob - other.logprob) < 1e-3


def test_the_projector_beside_a_model_is_found(tmp_path: Path) -> None:
    model = tmp_path / "M-Q4_K_M.gguf"
    model.write_bytes(b"")
    (tmp_path / "mmproj-folder.gguf").mkdir()
    assert find_projector(model) is None
    order = (
        "M.mmproj-Q5_1.gguf",
        "mmproj-M-Q8_0.gguf",
        "mmproj-F16.gguf",
        "mmproj-F32.gguf",
        "M-mmproj-BF16.gguf",
    )
    for name in order:
        (tmp_path / name).write_bytes(b"")
        assert find_projector(model) == tmp_path / name
    for other in ("mmprojector.gguf", "mmproj.txt", "mmproj-BF16.gguf.part"):
        (tmp_path / other).write_bytes(b"")
    assert find_projector(model) == tmp_path / order[-1]
    assert find_projector(tmp_path) == tmp_path / order[-1], "a directory made of a GGUF model"
    shutil.rmtree(tmp_path)
    assert find_projector(model) is None
