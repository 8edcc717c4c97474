"""The process that encodes pictures: what is kept, what ends it, and what a lost one costs."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, KernelError, ModelLoadError, RequestError
from twofold.engine import Engine
from twofold.fit.plan import Machine, plan_fit
from twofold.models import open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.bench.transformers_speed import TransformersBench
from twofold.tools.cli.doctor.machine_checks import check_model
from twofold.tools.cli.main import main
from twofold.tools.cli.picture_prompts import picture_part, rendered_prompt
from twofold.vision.encoded import EncodedPicture, SentPicture
from twofold.vision.loading import open_encoder
from twofold.vision.service import PictureService, PictureSource
from twofold.vision.source import picture_source

from tests.e2e.waiting import wait_until
from tests.tiny_models.pictures import encoder_of, picture, write_picture_model


def file_of(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eye")
    write_picture_model(folder, "qwen3_vl_moe")
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[PictureService]:
    """One process for all tests that change nothing of it: each start imports transformers."""
    made = PictureService(PictureSource(folder, None, 64, {}, "cpu", 1, 1 << 20, 0))
    yield made
    made.close()


def encoded(service: PictureService, data: bytes, *, low_detail: bool = False) -> EncodedPicture:
    (made,) = service.encode([SentPicture(data, "x", low_detail)])
    return made


def process_of(service: PictureService) -> int:
    assert service._worker is not None
    return service._worker._process.pid


def test_rows_are_those_of_the_encoder(folder: Path, service: PictureService) -> None:
    encoder = encoder_of(folder)
    prepared = encoder.prepared(picture(50, 37, 5))
    before_s = service.stats().encode_s
    made = encoded(service, file_of(50, 37, 5))
    (known,) = encoder.pictures([prepared])
    expected = known.media
    np.testing.assert_array_equal(made.media.rows, expected.rows)
    np.testing.assert_array_equal(made.media.deep, expected.deep)
    assert made.media.digest == expected.digest
    assert (made.text, list(made.runs)) == encoder.collapsed(prepared.text)
    assert made.media.num_pixels == 50 * 37
    assert service.stats().encode_s > before_s


def test_pictures_of_one_request_are_those_alone(service: PictureService) -> None:
    """In one question: new, kept, twice the same, and damaged ones."""
    seeds = (20, 21, 0, 22, 20, 23, 23, 24, 25, 26, 27, 28, 29, 30)
    sizes = [(50 + seed, 37) for seed in seeds]
    encoded(service, file_of(50, 37))
    stats = service.stats()
    sent = [
        SentPicture(file_of(*size, seed), f"[{n}]")
        for n, (size, seed) in enumerate(zip(sizes, seeds, strict=True))
    ]
    together = service.encode(sent)
    found = service.stats()
    assert (found.queries - stats.queries, found.hits - stats.hits) == (14, 3)
    alone = PictureService(replace(service.source, cache_bytes=0))
    try:
        for picture, (width, height), each in zip(together, sizes, sent, strict=True):
            (expected,) = alone.encode([each])
            assert (picture.text, picture.runs, picture.grid) == (expected.text, expected.runs, expected.grid)
            assert picture.media.digest == expected.media.digest
            assert picture.media.num_pixels == width * height
            np.testing.assert_allclose(picture.media.rows, expected.media.rows, rtol=0, atol=1e-5)
            np.testing.assert_allclose(picture.media.deep, expected.media.deep, rtol=0, atol=1e-5)
    finally:
        alone.close()
    with pytest.raises(RequestError, match="second"):
        service.encode([SentPicture(file_of(60, 37, 99), "first"), SentPicture(b"GIF89a", "second")])


def test_a_process_that_is_lost_or_idle_and_what_is_kept(service: PictureService) -> None:
    """A lost process fails one picture. Kept are the latest pictures within the bound, and an idle process ends."""
    one = file_of(50, 37)
    size = encoded(service, one).num_bytes
    own = PictureService(replace(service.source, cache_bytes=2 * size, idle_s=2.0))
    try:
        own.load()
        os.kill(process_of(own), signal.SIGKILL)
        with pytest.raises(KernelError, match="ended"):
            encoded(own, one)
        for seed in (0, 1, 0, 2, 0, 1):  # 1 has left for 2; the first starts another process
            made = encoded(own, file_of(50, 37, seed))
        stats = own.stats()
        assert (stats.queries, stats.hits) == (6, 2)
        assert stats.cached_bytes == 2 * size
        encoded(own, one, low_detail=True)
        assert (own.stats().queries, own.stats().hits) == (7, 2), "another setting is another picture"
        number = process_of(own)
        wait_until(lambda: not own.stats().is_loaded)
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
        assert encoded(own, file_of(50, 37, 1)) is made
        assert not own.stats().is_loaded, "a kept picture needs no encoder"
    finally:
        own.close()


def test_refusals_leave_the_process(service: PictureService) -> None:
    service.load()
    number = process_of(service)
    for data in (b"", b"GIF89a", file_of(50, 37)[:200], file_of(900, 3)):
        with pytest.raises(RequestError, match="messages\\[2\\]") as raised:
            service.encode([SentPicture(data, "messages[2]")])
        assert raised.value.param == "messages[2]"
    assert process_of(service) == number


def test_an_encoder_of_another_model_is_refused(folder: Path, service: PictureService) -> None:
    wrong = PictureService(replace(service.source, hidden_size=48))
    try:
        with pytest.raises(ModelLoadError, match="expected the model's hidden size 48"):
            wrong.load()
        assert not wrong.stats().is_loaded
    finally:
        wrong.close()


def test_an_encoder_that_cannot_be_loaded_leaves_no_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Engine] = []

    def refuse(service: PictureService) -> None:
        raise ModelLoadError("damaged")

    monkeypatch.setattr(PictureService, "load", refuse)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    with pytest.raises(ModelLoadError, match="damaged"):
        Engine.load(
            EngineConfig(model=str(folder), accelerator="none", max_total_tokens=64, load_vision=True)
        )
    assert len(closed) == 1


def test_where_prompts_have_no_pictures_no_encoder_is_loaded_or_counted(folder: Path, tmp_path: Path) -> None:
    files, none = open_model_files(folder), '{"image": 0}'
    file = tmp_path / "one.png"
    file.write_bytes(file_of(50, 37))
    engine = Engine.load(
        EngineConfig(model=str(folder), accelerator="none", max_total_tokens=64, limit_mm_per_prompt=none)
    )
    try:
        assert engine.pictures is None
        with pytest.raises(ConfigError, match=r'takes no pictures \(--limit-mm-per-prompt \{"image": 0\}\)'):
            rendered_prompt(engine, [{"role": "user", "content": [picture_part(file)]}])
    finally:
        engine.close()
    size = measure_files(files)
    least = Machine(size.host_bytes(size.config.max_context), "none", "a test", threads=1)
    for config in (
        EngineConfig(model=str(folder)),
        EngineConfig(model=str(folder), limit_mm_per_prompt=none),
    ):
        counts = config.takes_pictures
        assert plan_fit(config, (), files, least).fits != counts
        assert ("picture encoder takes" in check_model(config).found) == counts
    with pytest.raises(ConfigError, match="--load-vision and a --limit-mm-per-prompt of no image"):
        EngineConfig(load_vision=True, limit_mm_per_prompt=none)
    with pytest.raises(ConfigError, match="--limit-mm-per-prompt was given 'many', which is not JSON"):
        EngineConfig(limit_mm_per_prompt="many")


def test_placing_counts_the_pictures(service: PictureService) -> None:
    made = encoded(service, file_of(50, 37))
    token = service._started().tokens.rows[0]
    placed = service.placed([5, token, 6, token, 7], [made, made])
    count = made.runs[0]
    assert [(span.begin, span.count) for span in placed.media.spans] == [(1, count), (2 + count, count)]
    assert placed.offsets.tolist() == [0, 1, 1 + count, 2 + count, 2 + 2 * count, 3 + 2 * count]
    with pytest.raises(ValueError, match="1 tokens that stand for pictures; 2 were expected"):
        service.placed([5, token, 6], [made, made])


@pytest.mark.parametrize("make", ["quantize", "pack"])
def test_a_model_made_of_this_one_keeps_its_encoder(folder: Path, tmp_path: Path, make: str) -> None:
    further = ["--format", "q8_0", "--max-tokens", "0"] if make == "quantize" else []
    made = tmp_path / make
    assert main([make, str(folder), str(made), *further]) == 0
    expected = open_encoder(folder, None, "cpu")
    found = open_encoder(made, None, "cpu")
    prepared = expected.prepared(picture(50, 37))
    rows = [each.pictures([prepared])[0].media.rows for each in (found, expected)]
    np.testing.assert_array_equal(*rows)
    files = open_model_files(made)
    assert picture_source(EngineConfig(), made, files, threads=1) is not None
    assert (
        measure_files(files).encoder_elements == measure_files(open_model_files(folder)).encoder_elements > 0
    )


def test_a_model_that_transformers_has_with_pictures_alone_is_compared(folder: Path) -> None:
    speed = TransformersBench(folder, try_float32=False).answer_once([5, 6, 7], 3)
    assert (speed.prompt_tokens, speed.new_tokens) == (3, 3)
