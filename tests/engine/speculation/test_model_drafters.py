"""Drafters that keep state of their own: answers stay the same bits, and what they hold is freed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.step.drafters import draft_model
from twofold.step.drafters.draft_model import DraftModelDrafter
from twofold.step.drafters.draft_pages import DraftPagePool, DraftPages
from twofold.step.drafters.eagle3 import Eagle3Drafter
from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.engine_pairs import BATCHES, SAMPLINGS
from tests.engine.speculation.speculated_answers import (
    Answered,
    Asked,
    Corrected,
    all_records,
    answers,
    correct,
    expect_nothing_held,
    run_at_random,
)
from tests.tiny_models.eagle3 import TinyEagle3
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

TARGETS = {
    "mixture": TinyModel(num_layers=3, num_experts=9, top_k=3),
    "dense": EXAMPLES["qwen3"],
    "deep": replace(EXAMPLES["llama"], num_layers=6),
    "gated-delta": EXAMPLES["qwen3_next"],
    "windows": EXAMPLES["gpt_oss"],
}
SMALL = replace(EXAMPLES["qwen3"], num_layers=1)
HEAD = TinyEagle3()
DRAFTERS = (
    "eagle3",
    "ngram",
    "suffix",
    "suffix over earlier answers",
    "draft model",
    "draft model that is right",
)


@dataclass
class Engines:
    """Engines of each target with each drafter."""

    root: Path
    made: dict[tuple[object, ...], Engine] = field(default_factory=dict)
    known: dict[tuple[str, Asked], Answered] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            write_tiny_model(path, SMALL if name == "small" else TARGETS[name])
        return path

    def config(self, target: str) -> EngineConfig:
        return EngineConfig(
            model=str(self.model(target)),
            accelerator="none",
            cpu_threads=1,
            page_size=4,
            max_num_batched_tokens=24,
            max_total_tokens=112,
            max_num_seqs=6,
        )

    def answer(self, target: str, requested: Asked) -> Answered:
        key = target, requested._replace(prediction=(), cache_salt="")
        if key not in self.known:
            plain = self.engine(target, "", replace(self.config(target), enable_prefix_caching=False))
            self.known[key] = answers(plain, [key[1]])[0]
        return self.known[key]

    def speculative_config(self, target: str, drafter: str, depth: int, adaptive: bool) -> str | None:
        own = self.model("mixture" if target == "gated-delta" else target)
        hidden_size = TARGETS[target].hidden_size
        head = self.root / f"head {hidden_size}"
        if not head.exists():
            size = {"hidden_size": hidden_size, "target_hidden_size": hidden_size}
            replace(HEAD, **size, target_layers=(0, 1, 3)).write(head)  # type: ignore[arg-type]
        keys: dict[str, object] = {
            "": {},
            "eagle3": {"method": "eagle3", "model": str(head)},
            "ngram": {"method": "ngram", "prompt_lookup_min": 1},
            "suffix": {"method": "suffix"},
            "suffix over earlier answers": {"method": "suffix", "suffix_decoding_max_cached_requests": 9},
            "draft model": {"method": "draft_model", "model": str(self.model("small"))},
            "draft model that is right": {"method": "draft_model", "model": str(own)},
        }[drafter]  # type: ignore[assignment]
        return json.dumps(keys | {"num_speculative_tokens": depth, "adaptive": adaptive}) if keys else None

    def engine(
        self, target: str, drafter: str, config: EngineConfig, depth: int = 1, adaptive: bool = False
    ) -> Engine:
        own = self.speculative_config(target, drafter, depth, adaptive)
        config = replace(config, speculative_config=own)
        key = (config,)
        if key not in self.made:
            self.made[key] = Engine.load(config)
        return self.made[key]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("models"))
    yield made
    for engine in made.made.values():
        engine.close()


def expect_same_bits(engines: Engines, data: st.DataObject) -> None:
    target = data.draw(st.sampled_from([*TARGETS]), "target")
    config = replace(
        engines.config(target),
        accelerator=data.draw(st.sampled_from(["none", "emulated:rtx4090-pcie4"]), "accelerator"),
        enable_prefix_caching=data.draw(st.booleans(), "prefix cache"),
    )
    engine = engines.engine(
        target,
        data.draw(st.sampled_from(DRAFTERS), "drafter"),
        config,
        depth=data.draw(st.integers(1, 8), "depth"),
        adaptive=data.draw(st.booleans(), "adaptive"),
    )
    requested = data.draw(BATCHES, "asked")
    expected = [engines.answer(target, one) for one in requested]
    records = all_records(engine)
    assert answers(engine, requested, data.draw(st.integers(0, 3), "steps between")) == expected
    expect_nothing_held(engine, records)
    expect_no_draft_pages(engine)


def expect_no_draft_pages(engine: Engine) -> None:
    assert engine.speculator is not None
    model = engine.speculator._model
    if model is not None:
        drafter = model.drafter.real if isinstance(model.drafter, Corrected) else model.drafter
        pages = drafter.pages  # type: ignore[attr-defined]
        assert sorted(pages._free) == list(range(pages.num_pages))
        assert not pages._held
        assert not getattr(drafter, "_followed", {})


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_no_bit_of_an_answer_depends_on_the_drafter(engines: Engines, data: st.DataObject) -> None:
    expect_same_bits(engines, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=400, deadline=None, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_no_bit_depends_on_it_in_many_cases(engines: Engines, data: st.DataObject) -> None:
    expect_same_bits(engines, data)


def proposals(engine: Engine) -> list[tuple[tuple[int, ...], Draft]]:
    """Texts and their drafts, filled as the engine runs."""
    assert engine.speculator is not None
    assert engine.speculator._model is not None
    drafter = engine.speculator._model.drafter
    real, seen = drafter.propose_all, list[tuple[tuple[int, ...], Draft]]()

    def watched(sequences: list[Sequence], depths: list[int]) -> list[Draft]:
        drafts: list[Draft] = real(sequences, depths)
        seen.extend((tuple(s.token_ids), draft) for s, draft in zip(sequences, drafts, strict=True))
        return drafts

    drafter.propose_all = watched  # type: ignore[assignment]
    return seen


def test_drafts_are_what_the_draft_model_itself_would_answer(engines: Engines) -> None:
    """After rejections, in batches and after prompts in chunks: its keys and values are those of the text."""
    config = replace(engines.config("mixture"), max_total_tokens=512, seed=1)
    engine = engines.engine("mixture", "draft model", config, depth=4)
    small = engines.engine("mixture", "", replace(config, model=str(engines.model("small"))))
    seen = proposals(engine)
    requested = [
        Asked(
            tuple(random_prompt(length, length)), SamplingParams(max_tokens=18, temperature=1.0, seed=length)
        )
        for length in (4, 90, 37)
    ]
    answers(engine, requested, 2)
    drafted = [(text, draft.tokens) for text, draft in seen if draft.tokens]
    assert len(drafted) > 20
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for text, tokens in random.Random(1).sample(drafted, 12):
        assert answers(small, [Asked(text, greedy)])[0].tokens[: len(tokens)] == tokens


def test_a_model_as_its_own_drafter_is_always_accepted(engines: Engines) -> None:
    config = replace(engines.config("mixture"), max_total_tokens=512, seed=2)
    engine = engines.engine("mixture", "draft model that is right", config, depth=4)
    requested = Asked(
        tuple(random_prompt(9, 9)), SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True)
    )
    before = engine.stats().num_steps
    answers(engine, [requested])
    assert engine.stats().num_steps - before == 1 + 4  # 1 token, then 5 a step
    counts = engine.stats().speculation
    assert counts is not None
    assert counts.num_accepted_tokens == counts.num_draft_tokens == 16


def test_a_long_prompt_is_computed_in_parts_beside_other_answers(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "_CATCH_UP_S", 0.0)
    monkeypatch.setattr(draft_model, "_FEWEST_CAUGHT_UP", 32)
    config = replace(engines.config("mixture"), max_total_tokens=512, seed=3)
    engine = engines.engine("mixture", "draft model", config, depth=2)
    assert engine.speculator is not None
    assert engine.speculator._model is not None
    model = engine.speculator._model.drafter._model  # type: ignore[attr-defined]
    real, passes = model.forward, list[list[int]]()

    def watched(chunks: list[draft_model.Chunk]) -> object:
        passes.append([len(chunk.tokens) for chunk in chunks])
        return real(chunks)

    model.forward = watched
    long = tuple(random_prompt(150, 1))
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers(engine, [Asked(long, greedy), Asked(long[:100], greedy)])
    caught_up = [sum(count for count in counts if count > 17) for counts in passes]
    assert max(caught_up) == 32
    assert 150 + 100 - 2 * 17 <= sum(caught_up) <= 150 + 100 + 2


@pytest.mark.parametrize("num_steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", ["suffix over earlier answers", "draft model that is right", "eagle3"])
def test_nothing_leaks(engines: Engines, drafter: str, num_steps: int) -> None:
    config = replace(engines.config("mixture"), max_total_tokens=96, max_num_seqs=4, seed=num_steps)
    engine = engines.engine("mixture", drafter, config, depth=4)
    assert engine.speculator is not None
    if engine.speculator._model is not None:  # too few pages for all: sequences lose theirs to others
        own = engine.speculator._model.drafter
        assert isinstance(own, (DraftModelDrafter, Eagle3Drafter))
        own.pages = DraftPagePool(16, 4)
    requested = [
        Asked(
            tuple(random_prompt(5 + 7 * number, number)),
            replace(SAMPLINGS[number % 2], max_tokens=6 + 5 * (number % 4)),
        )
        for number in range(8)
    ]
    expected = [engines.answer("mixture", one) for one in requested]
    if drafter == "eagle3":  # drafts of a head with random weights are never accepted
        known = {one[:2]: answer.tokens for one, answer in zip(requested, expected, strict=True)}
        correct(engine, known, 0.6)
    records = all_records(engine)
    run_at_random(engine, requested, expected, num_steps)
    expect_nothing_held(engine, records)
    expect_no_draft_pages(engine)


def test_the_sequence_that_drafted_longest_ago_frees_its_pages() -> None:
    pool = DraftPagePool(4, 4)
    request = GenerationRequest((1,), SamplingParams(), lambda chunk: None, "one")
    first, second, third = (pool.of(Sequence(number, request, [1], 1)) for number in range(3))
    assert pool.grow(first, 8, [])
    assert pool.grow(second, 8, [first])
    first.num_known = second.num_known = 8
    assert not pool.grow(third, 4, [first, second])
    assert pool.grow(third, 4, [second])
    assert (first.num_known, second.num_known, pool.num_free) == (0, 8, 1)
    for number in range(3):
        pool.release(Sequence(number, request, [1], 1))
    assert pool.num_free == 4


@pytest.mark.parametrize(
    ("drafted", "text", "expected"),
    [([5, 6], [1, 2, 3, 5, 6, 7], 5), ([5, 6], [1, 2, 3, 5, 9], 4), ([5, 6], [1, 2, 3, 5], 3), ([], [1, 2, 3, 4], 3)],
)  # fmt: skip
def test_accepted_drafts_stay_in_the_cache(drafted: list[int], text: list[int], expected: int) -> None:
    held = DraftPages(num_known=3, drafted=list(drafted))
    held.settle(text)
    assert (held.num_known, held.drafted) == (expected, [])
