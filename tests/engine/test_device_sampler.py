"""Sampling by torch inside a step, against the host's sampler: the same seed picks the same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from twofold.api.types import Draw, SamplingParams
from twofold.blocks import ops
from twofold.device.sampler import CANDIDATES, ON_HOST, DeviceSampler
from twofold.step.sampler import Sampler, pick_undecided, sample

from tests.device.fake_device import FakeDevice

POOL = ops.ThreadPool(1)
WARM = SamplingParams(temperature=0.8, seed=0)
# What leaves its draw among the candidates whatever the logits.
DECIDED = {
    "greedy": SamplingParams(),
    "top-k": replace(WARM, top_k=20),
    "top-k of all candidates": replace(WARM, top_k=CANDIDATES),
    "top-k and top-p": replace(WARM, top_k=50, top_p=0.7),
    "top-k and min-p": replace(WARM, top_k=50, min_p=0.1),
    "all": replace(WARM, top_k=40, top_p=0.9, min_p=0.05, temperature=1.7),
    "cold": replace(WARM, temperature=1e-4),
    "min-p": replace(WARM, min_p=0.3),
    "hot": replace(WARM, top_k=100, temperature=100.0),
}
# What may leave some draws to the host.
OPEN = {
    "plain": WARM,
    "top-p": replace(WARM, top_p=0.5),
    "wide top-p": replace(WARM, top_p=0.999),
    "wide top-k": replace(WARM, top_k=CANDIDATES + 1),
    "small min-p": replace(WARM, min_p=1e-6),
}
SHAPES = [(8, 50), (6, CANDIDATES), (6, CANDIDATES + 1), (4, 5000)]
STEPS = 6


def random_logits(rows: int, vocabulary: int, seed: int, *, rounded: bool = False) -> np.ndarray:
    logits = 4 * np.random.default_rng(seed).standard_normal((rows, vocabulary), np.float32)
    return torch.from_numpy(logits).bfloat16().float().numpy() if rounded else logits


def play(params: list[SamplingParams], shape: tuple[int, int], rounded: bool) -> tuple[int, int]:
    """Samples steps on both sides; returns (picked on the device, picked in all)."""
    rows, vocabulary = shape
    mine = [Sampler(replace(p, seed=i), [1, 2]) for i, p in enumerate(params)]
    host = [Sampler(replace(p, seed=i), [1, 2]) for i, p in enumerate(params)]
    device = DeviceSampler(rows + 3, FakeDevice())
    on_device = 0
    for step in range(STEPS):
        logits = random_logits(len(params), vocabulary, step, rounded=rounded)
        device.fill([sampler.draw() for sampler in mine])
        picked = device.pick(torch.from_numpy(logits)).tolist()
        on_device += sum(token >= 0 for token in picked)
        tokens = pick_undecided(POOL, mine, picked, lambda rows, logits=logits: logits[rows])
        assert tokens == sample(POOL, host, logits)
    return on_device, STEPS * len(params)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*DECIDED, *OPEN])
def test_the_same_seed_picks_the_hosts_tokens(name: str, shape: tuple[int, int], rounded: bool) -> None:
    params = (DECIDED | OPEN)[name]
    on_device, total = play([params] * shape[0], shape, rounded)
    if name in DECIDED or shape[1] <= CANDIDATES:
        assert on_device == total
    elif name != "wide top-k":
        assert on_device > 0


def test_rows_of_all_kinds_in_one_batch_and_changed_logits_go_to_the_host() -> None:
    penalised = [
        replace(WARM, presence_penalty=1.0),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(repetition_penalty=1.3),
        replace(WARM, logit_bias=((3, 5.0),)),
        replace(WARM, bad_words=((1,),)),
        SamplingParams(min_tokens=3, stop_token_ids=(2,)),
        replace(WARM, logprobs=0),
    ]
    params = [*DECIDED.values(), *penalised, *OPEN.values()]
    on_device, total = play(params, (len(params), 700), rounded=True)
    assert on_device == total - STEPS * len(penalised)


def test_a_row_whose_draw_is_outside_the_candidates_is_sampled_by_the_host() -> None:
    device = DeviceSampler(1, FakeDevice())
    flat = torch.zeros((1, 4 * CANDIDATES))

    def picked(draw: Draw) -> int:
        device.fill([draw])
        return int(device.pick(flat)[0])

    plain = Draw(1.0, 0, 1.0, 0.0, 0.2)
    assert picked(plain) == int(0.2 * 4 * CANDIDATES)
    assert picked(replace(plain, uniform=0.3)) == ON_HOST
    assert picked(replace(plain, uniform=0.3, top_p=0.25)) == int(0.3 * CANDIDATES)
    assert picked(replace(plain, top_p=0.26)) == ON_HOST
    assert picked(replace(plain, min_p=0.5)) == ON_HOST
    assert picked(replace(plain, top_k=CANDIDATES)) == int(0.2 * CANDIDATES)


def test_a_draw_stays_until_a_token_is_taken() -> None:
    sampler, other = Sampler(WARM, ()), Sampler(WARM, ())
    first = sampler.draw()
    assert sampler.draw() == first  # a step that was lost is computed again
    sampler.take(3)
    assert sampler.draw() != first
    logits = random_logits(1, 30, 0)[0]
    assert first == other.draw()
    sample(POOL, [other], logits[None])
    assert other.draw() == sampler.draw()
    greedy = Sampler(SamplingParams(), ()).draw()
    assert greedy is not None
    assert greedy.uniform == 0.0


def test_padding_rows_change_no_result_and_too_many_are_refused() -> None:
    device = DeviceSampler(4, FakeDevice())
    logits = torch.from_numpy(random_logits(4, 100, 5))
    logits[2:] = float("nan")
    draws = [Sampler(replace(WARM, seed=i), ()).draw() for i in range(2)]
    device.fill([None] * 4)
    device.fill(draws)
    padded = device.pick(logits)
    assert padded[:2].tolist() == device.pick(logits[:2]).tolist()
    assert int(padded[:2].min()) >= 0
    with pytest.raises(ValueError, match="5 rows to sample were given; there is room for 4"):
        device.fill([None] * 5)


class NoLookAtValues(TorchDispatchMode):
    """Refuses what a stream capture would refuse: operations whose shape or branch depends on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "item", "equal", "unique", "masked_select")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert not any(name in str(function) for name in self.REFUSED), function
        return function(*args, **(kwargs or {}))


def test_a_captured_pick_follows_what_is_filled_in_later() -> None:
    rows, vocabulary = 6, 3000
    device = DeviceSampler(rows, FakeDevice())
    place = torch.zeros((rows, vocabulary))
    device.fill([])
    with NoLookAtValues():
        device.pick(place)
    captured = make_fx(lambda logits: device.pick(logits))(
        place
    )  # refuses `item`; replays operations on the buffers themselves
    params = [*DECIDED.values(), *OPEN.values()]
    for begin in range(len(params) - rows + 1):
        samplers = [Sampler(replace(p, seed=begin), ()) for p in params[begin : begin + rows]]
        place.copy_(torch.from_numpy(random_logits(rows, vocabulary, begin)))
        device.fill([sampler.draw() for sampler in samplers])
        picked = captured(place).tolist()
        assert picked == device.pick(place).tolist()
        decided = pick_undecided(POOL, samplers, picked, lambda rows: place[rows].numpy())
        again = [Sampler(replace(p, seed=begin), ()) for p in params[begin : begin + rows]]
        assert decided == sample(POOL, again, place.numpy())
