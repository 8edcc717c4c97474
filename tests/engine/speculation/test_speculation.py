"""Answers are the same bits with and without drafts, whatever the drafter, depth, placement, batch and sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.constraints import Constraint
from twofold.api.errors import ConfigError, KernelError
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.prefix import cache as prefix_cache
from twofold.text.chat.answer_grammar import Calls, answer_constraint
from twofold.text.chat.marks import ChatMarks

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import (
    DEPTH,
    NGRAM,
    Answered,
    Asked,
    ScriptedDrafter,
    all_records,
    answered,
    answers,
    expect_nothing_held,
    speculating,
    use_drafter,
)
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

KINDS = {
    "keys-and-values": TinyModel(num_layers=3, num_experts=9, top_k=3),
    "latent": EXAMPLES["glm4_moe_lite"],
    "gated-delta": EXAMPLES["qwen3_next"],
    "short-convolution": EXAMPLES["lfm2_moe"],
    "windows": EXAMPLES["gpt_oss"],
    "chunked-attention": EXAMPLES["llama4"],
}
PROMPTS = tuple(tuple(random_prompt(length, length)) for length in (3, 17, 40, 26))
ENDS = tuple((token, 4.0) for token in range(3, 60, 7))
SAMPLINGS = (
    SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=14, temperature=1.0, seed=5, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=14, temperature=0.7, top_k=9, top_p=0.8, min_p=0.02, seed=9),
    SamplingParams(max_tokens=11, temperature=1.3, seed=2, presence_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=14, frequency_penalty=1.5, bad_words=((9, 30), (7,)), logprobs=1),
    SamplingParams(max_tokens=14, logit_bias=ENDS, stop_token_ids=(10, 24, 38), min_tokens=3, temperature=1.0, seed=1),
    SamplingParams(max_tokens=14, temperature=1.0, seed=4, stop=("a", "e", "12"), logprobs=0),
    SamplingParams(max_tokens=1, temperature=1.0, seed=3),
)  # fmt: skip
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
}
TOOL_CALL = answer_constraint(
    None,
    Calls([{"type": "function", "function": WEATHER}], forced=True),
    ChatMarks("hermes"),
    opened=False,
    special_id=lambda mark: None,
)
CONSTRAINTS = (
    Constraint("regex", "[a-z]{3,9}( [0-9]{2,5}){2}"),
    Constraint("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})),
    Constraint("choice", '["yes, it is", "no", "it may be so"]'),
    TOOL_CALL,
)
ASKED = st.builds(
    Asked,
    st.sampled_from(PROMPTS),
    st.sampled_from(SAMPLINGS),
    st.lists(st.integers(0, 319), max_size=5).map(tuple),
    st.sampled_from((None, *CONSTRAINTS)),
    st.sampled_from(("", "", "one", "other")),
).map(
    lambda asked: (  # a form takes some tokens
        asked
        if asked.constraint is None
        else asked._replace(sampling=replace(asked.sampling, max_tokens=asked.sampling.max_tokens + 12))
    )
)
BATCHES = st.lists(st.tuples(ASKED, st.sampled_from([1, 1, 3])), min_size=1, max_size=3).map(
    lambda drawn: [choice for asked, n in drawn for choice in asked.choices(n)]
)
"""Requests of one batch; some are the choices of one request with n = 3."""


@dataclass
class Engines:
    """One model's engines, and its answers without speculation."""

    directory: str
    engines: dict[tuple[str, bool], tuple[Engine, list[int]]]
    plain: Engine
    known: dict[Asked, Answered]

    @classmethod
    def of(cls, directory: Path) -> Engines:
        config = cls.config(str(directory), "none", False)
        return cls(str(directory), {}, Engine.load(config), {})

    @staticmethod
    def config(directory: str, accelerator: str, caches: bool) -> EngineConfig:
        return EngineConfig(
            model=directory,
            accelerator=accelerator,
            cpu_threads=1,
            page_size=4,
            max_num_batched_tokens=24,
            max_total_tokens=112,
            enable_prefix_caching=caches,
            max_num_seqs=6,
        )

    def answer(self, asked: Asked) -> Answered:
        asked = asked._replace(prediction=(), cache_salt="")  # the first would be a drafter
        if asked not in self.known:
            self.known[asked] = answers(self.plain, [asked])[0]
        return self.known[asked]

    def engine(self, accelerator: str, caches: bool) -> tuple[Engine, list[int]]:
        key = accelerator, caches
        if key not in self.engines:
            engine = speculating(self.config(self.directory, accelerator, caches))
            self.engines[key] = engine, all_records(engine)
        return self.engines[key]

    def close(self) -> None:
        for engine in (self.plain, *(engine for engine, _ in self.engines.values())):
            engine.close()


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
    asked = data.draw(BATCHES, "asked")
    expected = [own.answer(one) for one in asked]
    known = {(one.prompt, one.sampling): answer.tokens for one, answer in zip(asked, expected, strict=True)}
    drafter = ScriptedDrafter(
        known,
        wrong=data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]), "wrong"),
        depth=data.draw(st.integers(0, DEPTH), "depth"),
    )
    use_drafter(engine, drafter, adaptive=data.draw(st.booleans(), "adaptive"))
    assert answers(engine, asked, data.draw(st.integers(0, 3), "steps between")) == expected
    expect_nothing_held(engine, records)


@pytest.mark.parametrize("kind", ["keys-and-values", "gated-delta"])
def test_an_oracle_saves_steps_and_a_liar_none(engines: dict[str, Engines], kind: str) -> None:
    engine, _ = engines[kind].engine("none", False)
    asked = Asked(PROMPTS[1], SAMPLINGS[1])
    known = {asked[:2]: engines[kind].answer(asked).tokens}
    num_steps = []
    for wrong in (0.0, 1.0):
        use_drafter(engine, ScriptedDrafter(known, wrong, depth=3))
        before = engine.stats().num_steps
        assert answers(engine, [asked]) == [engines[kind].answer(asked)]
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
    assert engine._speculator is not None
    engine._speculator._drafters = {}
    engine._speculator._config = SpeculativeConfig(
        num_speculative_tokens=4, prompt_lookup_min=2, adaptive=False
    )
    asked = Asked(PROMPTS[2], SAMPLINGS[1])
    answer = own.answer(asked).tokens
    # 13 tokens after the prompt's steps: 5 + 5 + 3. With an edit: 5, two until two equal tokens are found, 5, 1.
    for prediction, num_decodes in (((), 13), (answer, 3), ((*answer[:5], 7, *answer[6:]), 5)):
        chunks: list[Chunk] = []
        before = engine.stats().num_steps
        engine.submit(GenerationRequest(*asked[:2], chunks.append, "one", prediction=prediction))
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
    asked = [Asked(prompt, SAMPLINGS[0]) for prompt in PROMPTS]
    expected = answers(engine, asked)
    known = {one[:2]: answer.tokens for one, answer in zip(asked, expected, strict=True)}
    use_drafter(engine, ScriptedDrafter(known, 0.3))
    real, calls = getattr(engine._runner, fails), []

    def fail_late(*args: object) -> list[int]:
        calls.append(0)
        if len(calls) == 5:
            raise _always_failing()
        found: list[int] = real(*args)
        return found

    setattr(engine._runner, fails, fail_late)
    found = answers(engine, asked)
    assert any(answer.error and "the kernel broke" in answer.error for answer in found)
    expect_nothing_held(engine, records)
    assert answers(engine, asked) == expected
    engine.close()


def test_settings_that_change_outputs_are_refused_together(tmp_path: Path) -> None:
    for also in ({"num_deferred_experts": "2"}, {"cache_prior": 0.3}):
        with pytest.raises(ConfigError, match=r"--speculative-config and --.* were both given"):
            EngineConfig(speculative_config=NGRAM, **also)  # type: ignore[arg-type]
