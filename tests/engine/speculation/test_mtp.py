"""The model's own MTP layer as a drafter: its drafts against transformers' layers, and unchanged answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.speculative_config import parse_speculative_config
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.step import mtp_runner
from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence
from twofold.tools.cli.main import main

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.engine_pairs import BATCHES, PROMPTS, SAMPLINGS, Engines
from tests.engine.speculation.speculated_answers import (
    Answered,
    Asked,
    all_records,
    answers,
    correct,
    expect_nothing_held,
    run_at_random,
)
from tests.models.mtp_reference import MODELS, MtpReference
from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.writing import TinyModel, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

FIXED = '{"method": "mtp", "num_speculative_tokens": 3, "adaptive": false}'
PRICED = '{"method": "mtp", "num_speculative_tokens": 4}'


@pytest.mark.parametrize("chunk", [24, 7])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_drafts_are_those_of_the_reference(tmp_path: Path, family: str, chunk: int) -> None:
    """After prompts in chunks, accepted and rejected drafts: the layer's keys and values are always the model's."""
    model = MODELS[family]
    directory = write_tiny_model(tmp_path / "hf", model)
    config = replace(Engines.config(str(directory), "none", False), max_num_batched_tokens=chunk)
    plain = Engine.load(replace(config, kv_cache_dtype="float32"))
    requested = [Asked(prompt, SAMPLINGS[0]) for prompt in PROMPTS[1:3]]
    known = {one[:2]: answer.tokens for one, answer in zip(requested, answers(plain, requested), strict=True)}
    plain.close()
    engine = Engine.load(replace(config, kv_cache_dtype="float32", speculative_config=FIXED))
    correct(engine, known, 0.6)
    drafted: list[tuple[list[int], tuple[int, ...]]] = []
    real = mtp_runner.MtpRunner.draft
    engine_mtp_runner = engine.runner.mtp_runner  # type: ignore[attr-defined]

    def recorded_draft(sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        found = real(engine_mtp_runner, sequences, depths)
        drafted.extend((list(s.token_ids), draft.tokens) for s, draft in zip(sequences, found, strict=True))
        return found

    engine_mtp_runner.draft = recorded_draft
    assert [answer.tokens for answer in answers(engine, requested)] == list(known.values())
    engine.close()
    reference = MtpReference.of(model, tmp_path)
    assert len(drafted) > 8
    lengths = set()
    for tokens, draft in drafted:
        lengths.add(len(draft))
        logits = reference.logits(tokens, len(draft))
        expected = [int(np.argmax(each[-1] if each.ndim > 1 else each)) for each in logits]
        assert list(draft) == expected
    assert 3 in lengths


@dataclass
class Speculating:
    """Engines of one model that draft with its MTP layer, and the answers of one that does not."""

    plain: Engine
    directory: str
    known: dict[Asked, Answered]
    engines: dict[tuple[str, bool, str], tuple[Engine, list[int]]]

    def engine(self, accelerator: str, caches: bool, drafts: str) -> tuple[Engine, list[int]]:
        key = accelerator, caches, drafts
        if key not in self.engines:
            config = Engines.config(self.directory, accelerator, caches)
            engine = Engine.load(replace(config, speculative_config=drafts))
            self.engines[key] = engine, all_records(engine)
        return self.engines[key]

    def answer(self, requested: Asked) -> Answered:
        requested = requested._replace(prediction=(), cache_salt="")
        if requested not in self.known:
            self.known[requested] = answers(self.plain, [requested])[0]
        return self.known[requested]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Speculating]]:
    class Made(dict[str, Speculating]):
        def __missing__(self, family: str) -> Speculating:
            directory = str(write_tiny_model(tmp_path_factory.mktemp(family), MODELS[family]))
            plain = Engine.load(Engines.config(directory, "none", False))
            self[family] = Speculating(plain, directory, {}, {})
            return self[family]

    made = Made()
    patch = pytest.MonkeyPatch()
    patch.setattr(mtp_runner, "MAX_PENDING_STATES", 4)
    yield made
    patch.undo()
    for model in made.values():
        for engine in (model.plain, *(engine for engine, _ in model.engines.values())):
            engine.close()


def _no_bit_depends_on_drafts(models: dict[str, Speculating], family: str, data: st.DataObject) -> None:
    own = models[family]
    accelerator = data.draw(st.sampled_from(["none", "emulated:rtx4090-pcie4"]), "accelerator")
    depth, adaptive = data.draw(st.integers(1, 8), "depth"), data.draw(st.booleans(), "adaptive")
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": depth, "adaptive": adaptive})
    engine, records = own.engine(accelerator, data.draw(st.booleans(), "prefix cache"), drafts)
    requested = data.draw(BATCHES, "asked")
    expected = [own.answer(one) for one in requested]
    known = {
        (one.prompt, one.sampling): answer.tokens for one, answer in zip(requested, expected, strict=True)
    }
    correct(engine, known, data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]), "right"))
    assert answers(engine, requested, data.draw(st.integers(0, 3), "steps between")) == expected
    expect_nothing_held(engine, records)


HOW = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@settings(HOW, max_examples=12)
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_no_bit_of_an_answer_depends_on_drafts(
    models: dict[str, Speculating], family: str, data: st.DataObject
) -> None:
    _no_bit_depends_on_drafts(models, family, data)


@given(data=st.data())
@settings(HOW, max_examples=40)
@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_no_bit_of_an_answer_depends_on_drafts_in_any_family(
    models: dict[str, Speculating], family: str, data: st.DataObject
) -> None:
    _no_bit_depends_on_drafts(models, family, data)


def test_drafts_are_accepted(models: dict[str, Speculating]) -> None:
    own = models["glm4_moe"]
    engine, records = own.engine("none", False, FIXED)
    requested = Asked(PROMPTS[1], SAMPLINGS[1])
    correct(engine, {requested[:2]: own.answer(requested).tokens}, 1.0)
    before = engine.stats().num_steps
    assert answers(engine, [requested]) == [own.answer(requested)]
    # The prompt's step picks one token; 13 more, at most 4 a step.
    assert engine.stats().num_steps - before == 1 + 4
    expect_nothing_held(engine, records)


@pytest.mark.parametrize("num_steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_nothing_leaks(models: dict[str, Speculating], family: str, num_steps: int) -> None:
    own = models[family]
    config = replace(Engines.config(own.directory, "none", True), max_num_seqs=4, max_total_tokens=80)
    engine = Engine.load(replace(config, speculative_config=FIXED))
    records = all_records(engine)
    requested = [
        Asked(
            tuple(random_prompt(5 + 6 * number, number)),
            replace(SAMPLINGS[number % 2], max_tokens=6 + 5 * (number % 4)),
        )
        for number in range(8)
    ]
    expected = [own.answer(one) for one in requested]
    correct(engine, {one[:2]: answer.tokens for one, answer in zip(requested, expected, strict=True)}, 0.6)
    run_at_random(engine, requested, expected, num_steps)
    expect_nothing_held(engine, records)
    engine.close()


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "qwen3_next_mtp", "NEXTN"])
def test_other_engines_names_of_the_method(name: str) -> None:
    assert parse_speculative_config(f'{{"method": "{name}"}}').method == "mtp"


def test_files_without_an_mtp_layer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_tiny_model(tmp_path, TinyModel())
    with pytest.raises(ModelLoadError, match="has no MTP layer"):
        Engine.load(EngineConfig(model=str(directory), accelerator="none", speculative_config=FIXED))
    assert main(["generate", str(directory), "--prompt", "x", "--speculative-config", FIXED]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigError, match="it takes a whole number from 1 to 16"):
        parse_speculative_config('{"method": "mtp", "num_speculative_tokens": 17}')


def test_a_damaged_layer_is_refused_in_one_line(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, MODELS["glm4_moe"])
    config = directory / "config.json"
    text = config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    config.write_text(text)
    with pytest.raises(ModelLoadError, match="has no MTP layer"):
        Engine.load(EngineConfig(model=str(directory), accelerator="none", speculative_config=FIXED))


def test_an_mtp_layer_costs_nothing_while_drafts_do_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the virtual clock, whose time other load does not change: prompts cost the layer, answers next to nothing."""
    monkeypatch.setattr(mtp_runner, "MAX_PENDING_STATES", 64)
    model = replace(MODELS["glm4_moe"], num_layers=6, seed=2)
    directory = str(write_tiny_model(tmp_path, model))
    sampling = SamplingParams(max_tokens=150, temperature=1.0, seed=1, ignore_eos=True)
    requested = Asked(tuple(random_prompt(8, 5)), sampling)
    took = []
    for drafts in (None, PRICED):
        engine = Engine.load(
            EngineConfig(
                model=directory,
                accelerator="emulated:rtx4090-pcie4",
                gpu_experts_ratio=0.25,
                cpu_threads=1,
                speculative_config=drafts,
            )
        )
        begin = engine._run_clock.read()
        answers(engine, [requested])
        took.append(engine._run_clock.read() - begin)
        engine.close()
    assert took[1] < 1.06 * took[0]
