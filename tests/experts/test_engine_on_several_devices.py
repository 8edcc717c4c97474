"""An engine on an emulated machine of two cards: the same answers, both cards in use, live changes of memory."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import ConfigError
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.tools.cli.placement.show import _lines as shown_lines

from tests.tiny_models.writing import TinyModel, write_tiny_model

PAIR = "emulated:rtx4090-pcie4+rtx3060-pcie3"
PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(dtype="bfloat16", num_layers=3)))


def load(model_dir, accelerator=PAIR, **changes):
    settings = {"accelerator": accelerator, "gpu_experts_ratio": 0.75, "cpu_threads": 1}
    return Engine.load(EngineConfig(model=model_dir, **{**settings, **changes}))


def answer(engine, temperature=0.9):
    chunks = []
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=60, ignore_eos=True)
    engine.generate(PROMPT, sampling, chunks.append)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy": "lru"},
        {"tensor_split": "1,3"},
        {"cache_prior": 0.0},
        {"prefetch": "off"},
        {"enable_dynamic_expert_update": True, "policy": "static", "gpu_prefill_token_threshold": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_of_the_cpu_alone(model_dir, settings, temperature):
    with closing(load(model_dir, **settings)) as pair, closing(load(model_dir, "none")) as plain:
        assert answer(pair, temperature) == answer(plain, temperature)
        assert pair.info.accelerator == PAIR
        prefetches = "policy" not in settings and settings.get("prefetch") != "off"
        assert (pair.stats().prefetch["predicted"] > 0) == prefetches


def test_a_placement_names_both_cards_and_survives_a_resize(model_dir):
    with closing(load(model_dir)) as engine:
        tokens = answer(engine)
        engine.start()
        placed = engine.control.expert_placement()
        assert placed.devices == ("rtx4090-pcie4", "rtx3060-pcie3")
        held = [device for layer in placed.held_by for device in layer]
        assert len(held) == sum(map(len, placed.resident))
        assert set(held) == {0, 1}
        lines = shown_lines({**placed._asdict(), "model": "tiny"})
        assert "rtx3060-pcie3" in "".join(lines)
        engine.control.resize(Resize(gpu_experts_ratio=0.25))
        smaller = engine.control.expert_placement()
        assert smaller.num_slots < placed.num_slots
        assert answer_again(engine) == tokens


def answer_again(engine):
    """The same request on a started engine."""
    tokens, done = [], threading.Event()

    def take(chunk):
        tokens.extend(chunk.token_ids)
        if chunk.finish_reason:
            done.set()

    sampling = SamplingParams(temperature=0.9, seed=7, max_tokens=60, ignore_eos=True)
    engine.submit(GenerationRequest(PROMPT, sampling, take, "again"))
    assert done.wait(60)
    return tokens


def test_a_split_for_other_cards_is_refused(model_dir):
    with pytest.raises(ConfigError, match="--tensor-split 3,1 was given with one device"):
        load(model_dir, "emulated:rtx4090-pcie4", tensor_split="3,1")
    with pytest.raises(ConfigError, match="has 3 shares; the machine has 2 devices"):
        load(model_dir, tensor_split="3,1,1")
