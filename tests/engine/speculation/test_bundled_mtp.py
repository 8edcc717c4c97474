"""The bundled model drafts for itself: answers, log probabilities and finish reasons as without, and useful drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
from twofold.api.config import EngineConfig
from twofold.api.constraints import Constraint
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path

from tests.engine.speculation.engine_pairs import CONSTRAINTS
from tests.engine.speculation.speculated_answers import Asked, answers

# Written for this test, in the manner of the books that the model has read.
BEGINNINGS = (
    "Once upon a time there was a king who had three sons, and when he grew old he called them before him and said:",
    "The wolf knocked at the door of the little house, and",
    "Early in the morning the princess rose, put on her golden shoes and went down to the well in the garden, where",
    "There lived at the edge of the forest a poor woodcutter and his wife, who had nothing to eat but",
    "'Good mother,' said the girl, 'why do you weep?' 'Because I am hungry,' answered",
    "When the giant saw that the tailor was so strong, he was afraid, and",
)
FIXED = '{"method": "mtp", "num_speculative_tokens": 3, "adaptive": false}'
PRICED = '{"method": "mtp", "num_speculative_tokens": 4}'


@dataclass(frozen=True)
class Pair:
    off: Engine
    on: Engine

    def ask(self, samplings: list[SamplingParams], constraints: Seq[Constraint | None] = (None,)) -> None:
        """Ask both for all beginnings at once; expect the same answers."""
        requested = [
            Asked(tuple(self.off.tokenizer.encode(text)), sampling, constraint=constraint)
            for text in BEGINNINGS
            for sampling in samplings
            for constraint in constraints
        ]
        assert answers(self.on, requested) == answers(self.off, requested)


def pair(speculative_config: str, accelerator: str = "none") -> Pair:
    plain = EngineConfig(
        model=str(bundled_model_path()), accelerator=accelerator, cpu_threads=1, gpu_experts_ratio=0.25
    )
    drafted = EngineConfig(
        model=str(bundled_model_path()),
        accelerator=accelerator,
        cpu_threads=1,
        gpu_experts_ratio=0.25,
        speculative_config=speculative_config,
    )
    return Pair(Engine.load(plain), Engine.load(drafted))


@pytest.fixture(scope="module")
def drafted() -> Iterator[Pair]:
    found = pair(FIXED)
    yield found
    found.off.close()
    found.on.close()


def test_answers_are_the_same_and_half_of_the_first_drafts_are_right(drafted: Pair) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
    sampled = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=4, logprobs=0)
    drafted.ask([greedy, sampled])
    counts = drafted.on.stats().speculation
    assert counts is not None
    assert counts.num_accepted_tokens > 0.5 * counts.num_drafts
    by_position = counts.accepted_by_position
    assert by_position[0] > 0.4 * counts.num_drafts
    assert list(by_position) == sorted(by_position, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("method", ["mtp", "ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_choices_and_forms_are_the_same(method: str, adaptive: bool, accelerator: str) -> None:
    """n = 3, grammars, a tool call, stop strings and penalties, with every drafter that needs no trained head."""
    keys: dict[str, object] = {"method": method, "num_speculative_tokens": 5, "adaptive": adaptive}
    if method == "draft_model":
        keys["model"] = str(bundled_model_path())
    found = pair(json.dumps(keys), accelerator)
    samplings = [
        SamplingParams(max_tokens=40, temperature=0.9, seed=seed, logprobs=1, frequency_penalty=0.2)
        for seed in range(3)
    ]
    samplings.append(SamplingParams(max_tokens=40, temperature=0.0, stop=("the",), min_tokens=5, logprobs=0))
    found.ask(samplings, (None, *CONSTRAINTS))
    counts = found.on.stats().speculation
    assert counts is not None
    assert counts.num_accepted_tokens > 0
    found.off.close()
    found.on.close()


@pytest.mark.slow
@pytest.mark.parametrize("speculative_config", [FIXED, PRICED])
@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_long_answers_are_the_same(speculative_config: str, accelerator: str) -> None:
    found = pair(speculative_config, accelerator)
    samplings = [
        SamplingParams(max_tokens=200, temperature=0.0, logprobs=3, repetition_penalty=1.1),
        SamplingParams(max_tokens=200, temperature=0.8, top_p=0.9, seed=9, stop=("king",)),
        SamplingParams(
            max_tokens=120, temperature=1.2, top_k=30, seed=2, min_tokens=40, presence_penalty=0.5
        ),
    ]
    found.ask(samplings)
    found.off.close()
    found.on.close()
