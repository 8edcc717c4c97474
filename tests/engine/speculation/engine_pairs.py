"""Engines with and without drafts, and requests for both."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.constraints import Constraint
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.text.chat.answer_grammar import Calls, answer_constraint
from twofold.text.chat.marks import ChatMarks

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import (
    Answered,
    Asked,
    all_records,
    answers,
    speculating,
)
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel

KINDS = {
    "keys-and-values": TinyModel(num_layers=3, num_experts=9, top_k=3),
    "latent": EXAMPLES["glm4_moe_lite"],
    "gated-delta": EXAMPLES["qwen3_next"],
    "short-convolution": EXAMPLES["lfm2_moe"],
    "windows": EXAMPLES["gpt_oss"],
    "chunked-attention": EXAMPLES["llama4"],
    "indexer-and-streams": EXAMPLES["hy_v4"],
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
REQUESTED = st.builds(
    Asked,
    st.sampled_from(PROMPTS),
    st.sampled_from(SAMPLINGS),
    st.lists(st.integers(0, 319), max_size=5).map(tuple),
    st.sampled_from((None, *CONSTRAINTS)),
    st.sampled_from(("", "", "one", "other")),
).map(
    lambda requested: (  # a form takes some tokens
        requested
        if requested.constraint is None
        else requested._replace(
            sampling=replace(requested.sampling, max_tokens=requested.sampling.max_tokens + 12)
        )
    )
)
BATCHES = st.lists(st.tuples(REQUESTED, st.sampled_from([1, 1, 3])), min_size=1, max_size=3).map(
    lambda drawn: [choice for requested, n in drawn for choice in requested.choices(n)]
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

    def answer(self, requested: Asked) -> Answered:
        requested = requested._replace(prediction=(), cache_salt="")  # the first would be a drafter
        if requested not in self.known:
            self.known[requested] = answers(self.plain, [requested])[0]
        return self.known[requested]

    def engine(self, accelerator: str, caches: bool) -> tuple[Engine, list[int]]:
        key = accelerator, caches
        if key not in self.engines:
            engine = speculating(self.config(self.directory, accelerator, caches))
            self.engines[key] = engine, all_records(engine)
        return self.engines[key]

    def close(self) -> None:
        for engine in (self.plain, *(engine for engine, _ in self.engines.values())):
            engine.close()
