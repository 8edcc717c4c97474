"""Adapters on a device: steps of the fake device with the project's kernels, run by the SIMT machine, against the
CPU's. Kernels run without access checks here (`tests/simt` has them). This is not a GPU run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from twofold.adapters.adapter import Adapter, LowRank
from twofold.api.types import GenerationRequest, LoadedAdapter
from twofold.device.step_rows import decode_rows, flattened
from twofold.step.sequences import ScheduledSequence
from twofold.step.sequences import Sequence as Request
from twofold.tools.cli.main import main
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.adapters.adapted_runs import (
    adapted_runner,
    adapters_of,
    cpu_adapters,
    cpu_runner,
    errors_of,
    put,
    write_adapters,
)
from tests.device.runner_runs import scripted
from tests.tiny_models.kernel_sizes import FORMATS, MODELS, QWEN
from tests.tiny_models.writing import write_tiny_model

TOKENS = 4
QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss")
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
USES = (0, -1, 1)
"""The adapter of each request of a batch."""


def check(simt: ModuleType, root: Path, path: Path, *, slots: int = 9, uses: Sequence[int] = USES) -> None:
    """Logits of requests that use adapters are the CPU's but for what bf16 rounds; each adapter changes them."""
    runner = adapted_runner(simt, path, slots=slots)
    paths = write_adapters(root, runner)
    put(adapters_of(runner), paths)
    ours = scripted(runner, len(uses), TOKENS, QWEN.vocab_size, adapters=uses)
    assert runner.num_table_steps > 0
    assert runner.why_placed is None
    counts = runner.moe.counts()
    assert (counts.hits + counts.fetched > 0 < counts.cpu_misses) == (slots > 0)
    on_cpu = cpu_runner(path, paths)
    expected = scripted(on_cpu, len(uses), TOKENS, QWEN.vocab_size, adapters=uses)
    plain = scripted(on_cpu, len(uses), TOKENS, QWEN.vocab_size)
    of_row = np.repeat(uses, TOKENS)
    # Measured: 0.2 to 5 % in the median, more where a rounding sends a token to another expert.
    errors, changes = errors_of(ours, expected), errors_of(plain, expected)
    assert np.median(errors) < 0.06
    for use in set(uses):
        assert errors[of_row == use].min() < 0.1
        assert (np.median(changes[of_row == use]) > 2 * np.median(errors)) == (use >= 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_adapters_as_on_the_cpu(simt: ModuleType, tmp_path: Path, family: str) -> None:
    path = write_tiny_model(tmp_path / "model", MODELS[family])
    check(simt, tmp_path, path, slots=9 if MODELS[family].has_experts else 0)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_experts_compute_adapters_as_on_the_cpu(
    simt: ModuleType, tmp_path: Path, format: str
) -> None:
    size = max(64, LAYOUTS[format].block_columns)
    model = replace(QWEN, hidden_size=size, moe_intermediate_size=size, seed=1)
    source, made = write_tiny_model(tmp_path / "source", model), tmp_path / "made"
    assert main(["quantize", str(source), str(made), "--format", format, "--max-tokens", "0"]) == 0
    check(simt, tmp_path, made)


def test_ways_to_compute_a_step_agree(simt: ModuleType, tmp_path: Path) -> None:
    """A captured step, one that is launched kernel by kernel and one that the host places have the same bits, and a
    request has those of a batch of its own; so has one without an adapter among others."""
    path = write_tiny_model(tmp_path / "model", QWEN)
    paths = write_adapters(tmp_path, adapted_runner(simt, path, slots=0))
    found = []
    for options in ({}, {"graphs": False}, {"table_steps": False}):
        runner = adapted_runner(simt, path, slots=30, policy="lru", **options)
        put(adapters_of(runner), paths)
        found.append(scripted(runner, len(USES), TOKENS, QWEN.vocab_size, adapters=USES))
        assert (runner.num_table_steps > 0) == ("table_steps" not in options)
    np.testing.assert_array_equal(found[1], found[0])
    assert errors_of(found[2], found[0]).max() < 0.02
    plain = scripted(adapted_runner(simt, path, slots=30), len(USES), TOKENS, QWEN.vocab_size)
    rows = np.repeat(USES, TOKENS) == -1
    assert errors_of(plain, found[0])[rows].max() < 0.02
    assert errors_of(plain, found[0])[~rows].min() > 0.1


@pytest.mark.parametrize("homes", [(), (0, 1)])
def test_two_devices_compute_adapters_as_one(
    simt: ModuleType, tmp_path: Path, homes: tuple[int, ...]
) -> None:
    """All experts in slots: equal logits, bit by bit, wherever the dense layers and the experts are."""
    model = replace(QWEN, num_layers=2, mlp_only_layers=())
    path = write_tiny_model(tmp_path / "model", model)
    paths = write_adapters(tmp_path, adapted_runner(simt, path, slots=0))
    slots, found = model.num_layers * model.num_experts, []
    for options in (
        {"table_steps": False},
        {"others": [{}], "tensor_split": (0.4, 0.6), "homes": homes},
    ):
        runner = adapted_runner(simt, path, slots=slots, **options)
        put(adapters_of(runner), paths)
        found.append(scripted(runner, len(USES), TOKENS, QWEN.vocab_size, adapters=USES))
        assert runner.moe.counts().cpu_misses == 0
    assert {each.layout.home for each in adapters_of(runner)._dense} == {0, *homes}
    np.testing.assert_array_equal(found[1], found[0])


def test_steps_without_adapters_launch_none(
    simt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "model", QWEN)
    expected = scripted(adapted_runner(simt, path, slots=9), 2, TOKENS, QWEN.vocab_size)
    runner = adapted_runner(simt, path, slots=9)
    put(adapters_of(runner), write_adapters(tmp_path, runner))

    def launched(*_: object) -> None:
        raise AssertionError("a step without adapters launched their kernels")

    monkeypatch.setattr("twofold.device.adapters.products.Products.down", launched)
    np.testing.assert_array_equal(scripted(runner, 2, TOKENS, QWEN.vocab_size), expected)


def test_graphs_are_captured_again_for_what_a_new_adapter_changes(simt: ModuleType, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", QWEN)
    runner = adapted_runner(simt, path, slots=30)
    model = adapters_of(runner)
    paths = write_adapters(tmp_path, runner)
    put(model, paths[:1], [2])
    first = scripted(runner, 1, TOKENS, QWEN.vocab_size, adapters=[2])
    put(model, paths[1:], [3])
    second = scripted(runner, 1, TOKENS, QWEN.vocab_size, adapters=[3])
    model.drop(2)
    put(model, paths[1:], [2])  # the graph finds the new factors
    np.testing.assert_array_equal(scripted(runner, 1, TOKENS, QWEN.vocab_size, adapters=[2]), second)
    model.drop(3)
    assert errors_of(first, second).min() > 0.1
    assert runner.why_eager is None


@pytest.mark.parametrize("way", ["products", "replaced", "both"])
def test_embedding_and_head_change_as_on_the_cpu(simt: ModuleType, tmp_path: Path, way: str) -> None:
    path = write_tiny_model(tmp_path / "model", QWEN)
    random = np.random.default_rng(3)
    sizes = QWEN.vocab_size, QWEN.hidden_size

    def product(rank: int) -> LowRank:
        a, b = (
            random.normal(scale=0.5, size=size).astype(np.float32)
            for size in ((rank, sizes[1]), (sizes[0], rank))
        )
        return LowRank(a, b)

    names = ("model.embed_tokens", "lm_head")
    products = {name: product(3) for name in names} if way != "replaced" else {}
    replaced = (
        {name: random.normal(size=sizes).astype(np.float32) for name in names} if way != "products" else {}
    )
    adapter = Adapter("ends", "00", products, replaced, "")
    runner = adapted_runner(simt, path, slots=30)
    model = adapters_of(runner)
    model.put(1, model.prepare(adapter))
    ours = scripted(runner, 2, TOKENS, sizes[0], adapters=(1, -1))
    on_cpu = cpu_runner(path, [])
    own = cpu_adapters(on_cpu)
    own.put(1, own.prepare(adapter))
    expected = scripted(on_cpu, 2, TOKENS, sizes[0], adapters=(1, -1))
    assert np.median(errors_of(ours, expected)) < 0.03
    plain = scripted(on_cpu, 2, TOKENS, sizes[0])
    assert errors_of(plain, expected)[:TOKENS].min() > 0.2


def test_drafts_are_verified_with_the_adapter_of_their_sequence() -> None:
    def sequence(number: int, adapter: LoadedAdapter | None) -> Request:
        request = GenerationRequest((1, 2, 3), adapter=adapter)
        made = Request(number, request, [1, 2, 3], 8)
        made.pages, made.num_computed = [number], 2
        return made

    adapted = sequence(0, LoadedAdapter("a", 5, "00"))
    scheduled = [
        ScheduledSequence(adapted, 3, samples=True, drafts=(7, 8)),
        ScheduledSequence(sequence(1, None), 1, samples=True),
    ]
    assert [row.adapter for row in decode_rows(scheduled, int)] == [5, 5, 5, -1]
    batch, *_ = flattened(scheduled, 8, torch.device("cpu"), int)
    assert batch.adapters is not None
    assert batch.adapters.tolist() == [5, 5, 5, -1]
    plain, *_ = flattened(scheduled[1:], 8, torch.device("cpu"), int)
    assert plain.adapters is None
