"""Expert deferral and cache-aware routing in steps that the fake device places, and in those that the host places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from twofold.blocks.device_step import CachePrior
from twofold.blocks.router import Router
from twofold.device.kernels import TorchKernels
from twofold.device.runner import DeviceRunner

from tests.device.runner_runs import F32, make_cpu_runner, make_runner, scripted
from tests.tiny_models.writing import TinyModel, tiny_weights, write_tiny_model, write_weights

TINY = TinyModel(
    dtype="bfloat16", hidden_size=64, head_dim=32, num_layers=4, mlp_only_layers=(1,), num_experts=10, top_k=4
)
REQUESTS, TOKENS, DEFERRED = 3, 8, 2
STILL = {"fetch_rule": "none", "background_uploads": False}
"""Whatever has a slot keeps it, and nothing else gets one."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def learned(fake: ModuleType, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contents of a cache of 24 slots after a conversation."""
    runner = make_runner(fake, path, slots=24)
    spoken(runner)
    file = tmp_path_factory.mktemp("cache") / "state"
    runner.moe.save_cache(file)
    return file


def spoken(runner: DeviceRunner) -> F32:
    return scripted(runner, REQUESTS, TOKENS, TINY.vocab_size)


def distances(ours: F32, reference: F32) -> F32:
    """Relative distance per row."""
    found: F32 = np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)
    return found


@pytest.mark.parametrize("table_steps", [True, False])
def test_with_all_experts_on_the_cpu_it_is_what_the_cpu_alone_makes(
    fake: ModuleType, path: Path, tmp_path: Path, table_steps: bool
) -> None:
    weights = {
        name: torch.from_numpy(values).bfloat16().float().numpy()
        for name, values in tiny_weights(TINY).items()
    }
    in_f32 = write_tiny_model(tmp_path, replace(TINY, dtype="float32"))
    write_weights(in_f32, weights, dtype="float32", num_shards=TINY.num_shards)
    at_once, deferred = (
        scripted(make_cpu_runner(in_f32, most), REQUESTS, TOKENS, TINY.vocab_size) for most in (0, DEFERRED)
    )
    runner = make_runner(fake, path, slots=0, rules=STILL, table_steps=table_steps, num_deferred=DEFERRED)
    ours = spoken(runner)
    assert (runner.num_table_steps > 0) == table_steps
    # Roundings to bf16 lie between them, and less than what deferral changes.
    assert np.median(distances(ours, deferred)) < 0.25 * np.median(distances(ours, at_once))


def test_beside_slots_graphs_and_the_host_make_the_same(fake: ModuleType, path: Path, learned: Path) -> None:
    """Also in layers without experts on the CPU: the previous layer's deferred outputs are added there."""
    runs = {}
    for name, table_steps, most in (("graph", True, DEFERRED), ("host", False, DEFERRED), ("off", True, 0)):
        runner = make_runner(fake, path, slots=24, rules=STILL, table_steps=table_steps, num_deferred=most)
        assert runner.moe.restore_cache(learned) > 12
        runner.moe.executor.events_enabled = True
        runs[name] = spoken(runner)
        events = runner.moe.drain_events()["token_layer"]
        counts = runner.moe.counts()
        assert counts.hits > 0
        assert counts.cpu_misses > 0
        assert (0 < counts.deferred < counts.cpu_misses) == (most > 0)
        if name == "graph":
            by_row = {(e["step"], e["request"], e["layer"]): e["num_cpu"] for e in events}
            assert any(
                n == 0 and by_row.get((step, request, layer - 1), 0) > 0
                for (step, request, layer), n in by_row.items()
            ), "no row joins without an expert on the CPU of its own"
    separate, off = (distances(runs["graph"], runs[name]) for name in ("host", "off"))
    assert separate.max() < 0.1 * off.max()


@pytest.mark.parametrize("table_steps", [True, False])
def test_a_prior_raises_hits_and_leaves_weights_true(
    fake: ModuleType, path: Path, learned: Path, table_steps: bool
) -> None:
    hits = []
    for prior in (0.0, 0.8):
        runner = make_runner(fake, path, slots=12, rules=STILL, table_steps=table_steps, cache_prior=prior)
        runner.moe.restore_cache(learned)
        spoken(runner)
        hits.append(runner.moe.counts().hits)
    assert hits[1] > 1.1 * hits[0]


def test_the_devices_router_favours_as_the_hosts_does() -> None:
    """`ops/router.h`: a resident takes another's place where its score is at least (1 - prior) times as high."""
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.09, 0.01]]))
    for residents, prior, expected in (
        ([3], 0.5, [0, 1]),  # 0.18 against 0.3
        ([2], 0.3, [0, 1]),  # 0.286 against 0.3
        ([2], 0.4, [0, 2]),  # 0.333 against 0.3
        ([3, 4], 0.9, [3, 0]),  # 0.9 and 0.1
    ):
        mask = torch.zeros((1, 5), dtype=torch.bool)
        mask[0, residents] = True
        for score in ("softmax", "softmax_of_chosen"):
            router = Router(
                layer=0, hidden_size=8, num_experts=5, top_k=2, eps=1e-6, renormalise=True, score=score
            )
            ids, weights = TorchKernels().route(logits, router, None, CachePrior(prior, mask))
            assert ids[0].tolist() == expected
            true = logits.exp()[0, ids[0].long()]
            assert torch.allclose(weights[0], true / true.sum())
