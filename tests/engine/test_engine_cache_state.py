"""Prefetch and warm start through the engine: settings, files that cannot be used, and what survives a restart."""

from __future__ import annotations

import logging

import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import SamplingParams
from twofold.engine import Engine

from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(dtype="bfloat16", num_layers=3)))


def load(model_dir, **changes):
    settings = {"accelerator": "emulated:rtx4090-pcie4", "gpu_experts_ratio": 0.5, "cpu_threads": 1}
    return Engine.load(EngineConfig(model=model_dir, **{**settings, **changes}))


def answer(engine, max_tokens=40):
    chunks = []
    sampling = SamplingParams(temperature=0.9, seed=7, max_tokens=max_tokens, ignore_eos=True)
    engine.generate(PROMPT, sampling, chunks.append)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize(("prefetch", "policy", "on"), [
    ("auto", "payback", True), ("auto", "lru", False), ("on", "lru", True), ("off", "payback", False),
])  # fmt: skip
def test_prefetch_is_on_where_asked_for_and_never_changes_an_answer(model_dir, prefetch, policy, on):
    engine = load(model_dir, prefetch=prefetch, policy=policy)
    plain = load(model_dir, accelerator="none")
    assert answer(engine) == answer(plain)
    assert (engine.stats().prefetch["predicted"] > 0) == on
    assert plain.stats().prefetch["predicted"] == 0
    engine.close()
    plain.close()


def test_prefetch_takes_one_of_three_words():
    with pytest.raises(ConfigError, match="--prefetch was given 'maybe'; it takes auto, on or off"):
        EngineConfig(prefetch="maybe")


def test_a_restart_restores_the_resident_experts(model_dir, tmp_path):
    state = tmp_path / "cache.state"
    first = load(model_dir, cache_state=str(state))
    tokens = answer(first)
    assert not state.exists()
    first.close()
    first.close()
    cold = load(model_dir)
    warm = load(model_dir, cache_state=str(state))
    assert answer(cold, 1) == answer(warm, 1) == tokens[:1]
    assert warm.stats().placement.hits > cold.stats().placement.hits
    assert [file.name for file in tmp_path.iterdir()] == ["cache.state"]
    cold.close()
    warm.close()


def test_a_warm_start_changes_no_answer(model_dir, tmp_path):
    state = str(tmp_path / "cache.state")
    first = load(model_dir, cache_state=state)
    tokens = answer(first)
    first.close()
    warm = load(model_dir, cache_state=state, gpu_experts_ratio=0.25)
    assert answer(warm) == tokens
    warm.close()


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "not a number", "other policy"])
def test_a_file_that_cannot_be_used_is_refused_at_load_and_kept(model_dir, tmp_path, damage):
    state = tmp_path / "cache.state"
    engine = load(model_dir, cache_state=str(state), policy="lru" if damage == "other policy" else "payback")
    answer(engine, 5)
    engine.close()
    good = state.read_bytes()
    bad = {
        "empty": b"",
        "cut": good[:-8],
        "foreign": b"PK" + good[2:],
        "not a number": good[:-8] + b"\xff" * 8,
        "other policy": good,
    }[damage]
    state.write_bytes(bad)
    with pytest.raises(ConfigError) as caught:
        load(model_dir, cache_state=str(state))
    assert str(state) in str(caught.value)
    assert "delete" in str(caught.value)
    assert state.read_bytes() == bad


def test_another_models_file_is_refused(model_dir, tmp_path):
    state = tmp_path / "cache.state"
    other = write_tiny_model(tmp_path / "model", TinyModel(dtype="bfloat16", num_layers=2))
    engine = load(str(other), cache_state=str(state))
    engine.close()
    with pytest.raises(ConfigError, match="made for 2 layers"):
        load(model_dir, cache_state=str(state))


def test_a_folder_that_is_not_there_is_refused_before_anything_is_served(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(model_dir, cache_state=str(tmp_path / "nowhere" / "cache.state"))


def test_without_slots_the_setting_is_ignored_with_a_line(model_dir, tmp_path, caplog):
    state = tmp_path / "cache.state"
    with caplog.at_level(logging.INFO, logger="twofold"):
        engine = load(model_dir, accelerator="none", cache_state=str(state))
    answer(engine, 3)
    engine.close()
    assert not state.exists()
    assert len([r for r in caplog.records if "is ignored: accelerator none" in r.getMessage()]) == 1
