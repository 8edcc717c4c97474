"""Answers are the same bits with and without drafts, whatever the drafter, depth, placement, batch and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, KernelError
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.prefix import cache as prefix_cache

from tests.engine.speculation.engine_pairs import (
    BATCHES,
    CONSTRAINTS,
    KINDS,
    PROMPTS,
    SAMPLINGS,
    Engines,
)
from tests.engine.speculation.speculated_answers import (
    DEPTH,
    NGRAM,
    Asked,
    ScriptedDrafter,
    all_records,
    answered,
    answers,
    expect_nothing_held,
    speculating,
    use_drafter,
)
from tests.tiny_models.writing import write_tiny_model


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engines]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(prefix_cache, "_MIN_TOKENS_PER_SPLIT", 8)
    patch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 2)
    made: dict[str, Engines] = {}

    class Made(dict[str, Engines]):
        def __missing__(self, kind: str) -> Engines:
            directory = write_tiny_model(tmp_path_factory.mktemp(kind), KINDS[kind])
            self[kind] = made[kind] = Engines.of(directory)
            return self[kind]

    yield Made()
    for each in made.values():
        each.close()
    patch.undo()


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_of_an_answer_depends_on_drafts(
    engines: dict[str, Engines], kind: str, data: st.DataObject
) -> None:
    own = engines[kind]
    accelerator = data.draw(st.sampled_from(["none", "emulated:rtx4090-pcie4"]), "accelerator")
    engine, records = own.engine(accelerator, data.draw(st.booleans(), "prefix cache"))
    requested = data.draw(BATCHES, "asked")
    expected = [own.answer(one) for one in requested]
    known = {
        (one.prompt, one.sampling): answer.tokens for one, answer in zip(requested, expected, strict=True)
    }
    drafter = ScriptedDrafter(
        known,
        wrong=data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]), "wrong"),
        depth=data.draw(st.integers(0, DEPTH), "depth"),
    )
    use_drafter(engine, drafter, adaptive=data.draw(st.booleans(), "adaptive"))
    assert answers(engine, requested, data.draw(st.integers(0, 3), "steps between")) == expected
    expect_nothing_held(engine, records)


@pytest.mark.parametrize("kind", ["keys-and-values", "gated-delta"])
def test_an_oracle_saves_steps_and_a_wrong_drafter_none(engines: dict[str, Engines], kind: str) -> None:
    engine, _ = engines[kind].engine("none", False)
    requested = Asked(PROMPTS[1], SAMPLINGS[1])
    known = {requested[:2]: engines[kind].answer(requested).tokens}
    num_steps = []
    for wrong in (0.0, 1.0):
        use_drafter(engine, ScriptedDrafter(known, wrong, depth=3))
        before = engine.stats().num_steps
        assert answers(engine, [requested]) == [engines[kind].answer(requested)]
        num_steps.append(engine.stats().num_steps - before)
    # The prompt's step picks one token; 13 more, at most 4 a step.
    assert num_steps == [1 + 4, 14]


@pytest.mark.parametrize("kind", ["keys-and-values", "short-convolution"])
def test_grammars_hold_with_drafts(engines: dict[str, Engines], kind: str) -> None:
    own = engines[kind]
    engine, records = own.engine("none", False)

    def run(to: Engine) -> list[tuple[tuple[int, ...], str | None]]:
        found = []
        for constraint in CONSTRAINTS[:2]:
            for sampling in (SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[4]):
                chunks: list[Chunk] = []
                compiled = to.compile(constraint)
                sampling = replace(sampling, max_tokens=30, ignore_eos=False)
                to.submit(GenerationRequest(PROMPTS[1], sampling, chunks.append, "one", constraint=compiled))
                while to.step():
                    pass
                tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
                known[PROMPTS[1], sampling] = tokens
                found.append((tokens, chunks[-1].finish_reason))
        return found

    known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = {}
    expected = run(own.plain)
    for wrong in (0.0, 0.4):
        use_drafter(engine, ScriptedDrafter(dict(known), wrong))
        assert run(engine) == expected
    expect_nothing_held(engine, records)


def test_the_requests_prediction_is_its_drafter(engines: dict[str, Engines]) -> None:
    own = engines["keys-and-values"]
    engine, records = own.engine("none", False)
    assert engine.speculator is not None
    engine.speculator._drafters = {}
    engine.speculator._config = SpeculativeConfig(
        num_speculative_tokens=4, prompt_lookup_min=2, adaptive=False
    )
    requested = Asked(PROMPTS[2], SAMPLINGS[1])
    answer = own.answer(requested).tokens
    # 13 tokens after the prompt's steps: 5 + 5 + 3. With an edit: 5, two until two equal tokens are found, 5, 1.
    for prediction, num_decodes in (((), 13), (answer, 3), ((*answer[:5], 7, *answer[6:]), 5)):
        chunks: list[Chunk] = []
        before = engine.stats().num_steps
        engine.submit(GenerationRequest(*requested[:2], chunks.append, "one", prediction=prediction))
        while engine.step():
            pass
        assert answered(chunks).tokens == answer
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.rejected_prediction_tokens == len(prediction) - usage.accepted_prediction_tokens
        assert usage.accepted_prediction_tokens == 13 - num_decodes
        assert engine.stats().num_steps - before == 2 + num_decodes
    expect_nothing_held(engine, records)


@cache
def _always_failing() -> KernelError:
    return KernelError("the kernel broke")


@pytest.mark.parametrize("fails", ["forward", "pick_verified"])
def test_a_failed_step_leaves_nothing(tmp_path: Path, fails: str) -> None:
    directory = write_tiny_model(tmp_path, KINDS["gated-delta"])
    engine = speculating(Engines.config(str(directory), "none", True))
    records = all_records(engine)
    requested = [Asked(prompt, SAMPLINGS[0]) for prompt in PROMPTS]
    expected = answers(engine, requested)
    known = {one[:2]: answer.tokens for one, answer in zip(requested, expected, strict=True)}
    use_drafter(engine, ScriptedDrafter(known, 0.3))
    real, calls = getattr(engine.runner, fails), []

    def fail_late(*args: object) -> list[int]:
        calls.append(0)
        if len(calls) == 5:
            raise _always_failing()
        found: list[int] = real(*args)
        return found

    setattr(engine.runner, fails, fail_late)
    found = answers(engine, requested)
    assert any(answer.error and "the kernel broke" in answer.error for answer in found)
    expect_nothing_held(engine, records)
    assert answers(engine, requested) == expected
    engine.close()


def test_settings_that_change_outputs_are_refused_together(tmp_path: Path) -> None:
    for also in ({"num_deferred_experts": "2"}, {"cache_prior": 0.3}):
        with pytest.raises(ConfigError, match=r"--speculative-config and --.* were both given"):
            EngineConfig(speculative_config=NGRAM, **also)  # type: ignore[arg-type]
