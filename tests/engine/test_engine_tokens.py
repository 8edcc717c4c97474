"""What a request may ask of its tokens, through the whole engine: log probabilities, stop tokens, limits, words."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import RequestError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams, TokenLogprob
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.models import open_model_files
from twofold.step.model import LoadedModel

from tests.engine.model_runs import Runner
from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 90, 40, 9, 1, 26, 17, 2)]
WARM = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(dtype="float32", num_layers=2)))


@pytest.fixture(scope="module")
def engine(model_dir: str) -> Any:
    made = Engine.load(EngineConfig(model=model_dir, accelerator="none", cpu_threads=2))
    yield made
    made.close()


class Answer:
    """The chunks of one request, checked as they come: a log probability for each token, in its chunk."""

    def __init__(self, params: SamplingParams) -> None:
        self._reports = params.logprobs is not None
        self.chunks: list[Chunk] = []

    def __call__(self, chunk: Chunk) -> None:
        assert [each.token_id for each in chunk.logprobs] == (list(chunk.token_ids) if self._reports else [])
        assert chunk.prompt_logprobs is None or not self.chunks
        self.chunks.append(chunk)

    @property
    def tokens(self) -> tuple[int, ...]:
        return sum((chunk.token_ids for chunk in self.chunks), ())

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return sum((chunk.logprobs for chunk in self.chunks), ())

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def answer(engine: Engine, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
    found = Answer(params)
    engine.generate(prompt, params, found)
    return found


def reference(model_dir: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Log softmax [tokens, vocabulary] in float64 of the model's own logits."""
    model = LoadedModel(open_model_files(model_dir), ops.ThreadPool(1))
    runner = Runner(model)
    (hidden,) = runner.step((runner.sequence(len(tokens)), tokens))
    logits = model.logits(hidden).astype(np.float64)
    highest = logits.max(axis=1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))


def check(found: TokenLogprob, token: int, row: np.ndarray, num_top: int) -> None:
    likeliest = np.argsort(-row, kind="stable")[:num_top].tolist()
    assert (found.token_id, [t for t, _ in found.top]) == (token, likeliest)
    values = [found.logprob, *(value for _, value in found.top)]
    assert np.abs(np.array(values) - row[[token, *likeliest]]).max() < 1e-12


@pytest.mark.parametrize("prompt", PROMPTS[:5])
def test_logprobs_are_log_softmax_of_the_models_logits(
    engine: Engine, model_dir: str, prompt: tuple[int, ...]
) -> None:
    found = answer(engine, prompt, replace(WARM, logprobs=5, prompt_logprobs=3, presence_penalty=1.5))
    rows = reference(model_dir, prompt + found.tokens)
    assert len(found.logprobs) == 12
    for at, each in enumerate(found.logprobs):
        check(each, found.tokens[at], rows[len(prompt) - 1 + at], 5)
    of_prompt = found.chunks[0].prompt_logprobs
    assert of_prompt is not None
    assert (len(of_prompt), of_prompt[0]) == (len(prompt), None)
    for at, each in enumerate(of_prompt[1:]):
        assert each is not None
        check(each, prompt[at + 1], rows[at], 3)


def test_asking_changes_no_token_and_eight_at_once_get_what_each_gets_alone(
    engine: Engine, model_dir: str
) -> None:
    kinds = [
        WARM,
        replace(WARM, logprobs=20, prompt_logprobs=0),
        replace(WARM, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
        replace(WARM, logit_bias=((9, 4.0), (10, -100.0)), bad_words=((9, 9), (11,))),
        replace(WARM, min_tokens=5, ignore_eos=False, logprobs=1),
        replace(WARM, top_k=5, top_p=0.8, min_p=0.01, prompt_logprobs=20),
        replace(WARM, temperature=0.0, presence_penalty=1.0, prompt_logprobs=1),
        replace(WARM, stop=("e",), logprobs=2),
    ]
    cases = list(zip(PROMPTS, kinds, strict=True))
    alone = [answer(engine, prompt, params) for prompt, params in cases]
    for (prompt, params), one in zip(cases, alone, strict=True):
        silent = answer(engine, prompt, replace(params, logprobs=None, prompt_logprobs=None))
        assert (silent.tokens, silent.text) == (one.tokens, one.text)
    # Chunks of 16 tokens and few pages: prompts are chunked, and at least one sequence is preempted.
    for policy, cached in (("fcfs", True), ("priority", True), ("priority", False)):
        crowded = Engine.load(
            EngineConfig(
                model=model_dir,
                accelerator="none",
                max_num_batched_tokens=16,
                max_total_tokens=112,
                page_size=4,
                scheduling_policy=policy,
                enable_prefix_caching=cached,
            )
        )
        together = [Answer(params) for _, params in cases]
        for number, (prompt, params) in enumerate(cases):
            request = GenerationRequest(prompt, params, together[number], f"r{number}")
            # The newest request is the first, but for one.
            crowded.submit(replace(request, priority=-(number % 7) if policy == "priority" else 0))
        preempted = set()
        while crowded.step():
            scheduler = crowded._scheduler
            preempted |= {s.number for s in (*scheduler.waiting, *scheduler.running) if s.was_preempted}
        assert preempted, f"no request was preempted: {policy}, {cached}"
        for one, other in zip(alone, together, strict=True):
            assert (other.tokens, other.logprobs, other.text) == (one.tokens, one.logprobs, one.text)
            assert other.chunks[0].prompt_logprobs == one.chunks[0].prompt_logprobs
        with (
            pytest.raises(RequestError, match="--scheduling-policy priority")
            if policy == "fcfs"
            else nullcontext()
        ):
            crowded.submit(replace(request, priority=3))
        crowded.close()


def test_a_stop_token_ends_the_answer_and_has_no_text(engine: Engine) -> None:
    plain = answer(engine, PROMPTS[0], WARM)
    last = next(token for token in plain.tokens if plain.tokens.index(token) >= 3)
    at = plain.tokens.index(last)
    stopped = answer(engine, PROMPTS[0], replace(WARM, stop_token_ids=(last,), logprobs=0))
    assert stopped.tokens == plain.tokens[: at + 1]
    assert stopped.chunks[-1].finish_reason == "stop"
    assert stopped.text == answer(engine, PROMPTS[0], replace(WARM, max_tokens=at)).text
    held_back = answer(engine, PROMPTS[0], replace(WARM, stop_token_ids=(last,), min_tokens=at + 2))
    assert last not in held_back.tokens[: at + 2]


def test_the_end_of_text_waits_for_min_tokens(engine: Engine) -> None:
    (end, *_) = engine.tokenizer.eos_token_ids
    eager = replace(WARM, ignore_eos=False, logit_bias=((end, 100.0),))
    assert answer(engine, PROMPTS[2], eager).tokens == (end,)
    late = answer(engine, PROMPTS[2], replace(eager, min_tokens=4))
    assert (len(late.tokens), late.tokens[-1], late.chunks[-1].finish_reason) == (5, end, "stop")


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_special_token_has_text_where_it_is_asked_for(engine: Engine, is_shown: bool) -> None:
    mark = min(engine.tokenizer.special_token_ids - engine.tokenizer.eos_token_ids)
    params = replace(WARM, max_tokens=3, logit_bias=((mark, 100.0),))
    found = Answer(params)
    shown = frozenset((mark,)) if is_shown else frozenset()
    engine.submit(GenerationRequest(PROMPTS[0], params, found, "marks", shown_tokens=shown))
    while not found.chunks or found.chunks[-1].finish_reason is None:
        engine.step()
    assert found.tokens == (mark,) * 3
    assert found.text == (engine.tokenizer.token_bytes(mark).decode() * 3 if is_shown else "")


@pytest.mark.parametrize("num_top", [None, 2])
def test_no_tokens_at_all(engine: Engine, num_top: int | None) -> None:
    steps = engine.stats().num_steps
    found = answer(engine, PROMPTS[1], SamplingParams(max_tokens=0, prompt_logprobs=num_top))
    (chunk,) = found.chunks
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (), "length")
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (90, 0)
    assert engine.stats().num_free_pages == engine.stats().num_pages
    assert (engine.stats().num_steps == steps) == (num_top is None)
    if num_top is None:
        assert chunk.prompt_logprobs is None
    else:
        more = answer(engine, PROMPTS[1], SamplingParams(max_tokens=2, prompt_logprobs=num_top))
        assert chunk.prompt_logprobs == more.chunks[0].prompt_logprobs


@pytest.mark.parametrize(
    ("requested", "param", "says"),
    [
        ({"logprobs": 21}, "logprobs", "logprobs is 21; it must be from 0 to 20"),
        ({"logprobs": -1}, "logprobs", "logprobs is -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "it must be from 0 to 20"),
        ({"max_tokens": -1}, "max_tokens", "it must be 0 or more"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "from 0 to max_tokens, 2"),
        ({"stop_token_ids": (10**6,)}, "stop_token_ids", "names token 1000000; ids are from 0"),
        ({"stop_token_ids": (1,) * 1025}, "stop_token_ids", "has 1025 tokens; at most 1024"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias", "names token -1"),
        ({"logit_bias": ((1, 0.0), (1, 1.0))}, "logit_bias", "names a token twice"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias", "token 1 is 100.5; it must be from -100 to 100"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias", "token 1 is nan"),
        ({"bad_words": ((1,), ())}, "bad_words", "holds an empty sequence"),
        ({"bad_words": ((1, 10**6),)}, "bad_words", "names token 1000000"),
        ({"bad_words": ((1,) * 600, (2,) * 600)}, "bad_words", "has 1200 tokens"),
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, requested: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        answer(engine, PROMPTS[0], SamplingParams(**requested))
    assert refused.value.param == param
