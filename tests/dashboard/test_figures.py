"""Figures carry the arrays they were given, small on the wire; texts say what the arrays say."""

from __future__ import annotations

import re

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.queries.step_times import EMULATED_PARTS, STEP_PARTS

from dashboard import explanation, formats, palette
from dashboard.figures import base as figures
from dashboard.figures import request as figures_request
from tests.dashboard.step_figures import step_figures


def grid(layers: int, experts: int, most: int = 9) -> queries.PlacementGrid:
    return queries.PlacementGrid(np.random.default_rng(0).integers(0, most, (layers, experts, 3)))


@pytest.mark.parametrize(("most", "unit"), [(9, ""), (100_000, " %")])
def test_the_heatmap_of_a_large_model_is_small_on_the_wire(most: int, unit: str) -> None:
    of_uses = grid(48, 128, most)
    figure = figures.placement_grid(of_uses, colour_by="place").built()
    assert figure.data[0].z.dtype == figure.data[0].customdata.dtype == np.uint8
    assert figure.data[0].z.shape == (48, 128)
    assert f"%{{customdata[0]}}{unit} hits" in figure.data[0].hovertemplate
    hits = of_uses.uses[3, 7, 0] if not unit else round(100 * of_uses.uses[3, 7, 0] / of_uses.total[3, 7])
    assert figure.data[0].customdata[3, 7, 0] == hits
    assert len(figure.to_json()) < 50_000


@pytest.mark.parametrize("colour_by", ["place", "hit share", "uses"])
def test_unused_experts_can_be_drawn(colour_by: str) -> None:
    empty = queries.PlacementGrid(np.zeros((2, 4, 3), np.int64))
    assert figures.placement_grid(empty, colour_by=colour_by).built().to_json()


def test_shares_are_stacked_in_percent() -> None:
    values = np.array([[0.5, np.nan], [0.3, np.nan], [0.2, np.nan]])
    figure = figures.shares(np.array([1.7e9, 1.7e9 + 1]), values, bucket_s=1).built()
    assert [trace.name for trace in figure.data] == ["GPU, hit", "GPU, fetched", "CPU"]
    assert [float(trace.y[0]) for trace in figure.data] == pytest.approx([50.0, 20.0, 30.0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.size(None), "–"),
        (formats.size(999), "0.001 MB"),
        (formats.size(393_216), "0.393 MB"),
        (formats.size(2_580_000), "2.6 MB"),
        (formats.size(2.58e12), "2,580,000 MB"),
        (formats.link_rate(2.58e9), "2.58 GB/s"),
        (formats.link_rate(None), "–"),
        (formats.rate(1968.4), "1,968"),
        (formats.rate(18.25), "18.2"),
        (formats.percent(0.6615), "66.1%"),
        (formats.microseconds(912.3), "912 µs"),
        (formats.microseconds(3456.0), "3.5 ms"),
        (formats.milliseconds(float("nan")), "–"),
        (formats.milliseconds(12_345), "12.3 s"),
        (formats.duration(300), "5 min 0 s"),
        (formats.duration(7300), "2 h 1 min"),
    ],
)
def test_figures_as_texts(text: str, expected: str) -> None:
    assert text == expected


def tokens(step_us: list[float], batch: list[int]) -> queries.RequestTokens:
    """Two layers, two experts each; token 1 misses three of four."""
    count = len(step_us)
    placement = np.zeros((count, 2, 2), np.int8)
    placement[1] = [[1, 2], [0, 1]]
    by_place = np.stack([(placement == place).sum(axis=2) for place in range(3)], axis=2)
    layer_us = np.tile([100.0, 50.0], (count, 1))
    layer_us[1] = 700.0, 60.0
    return queries.RequestTokens(
        position=np.arange(10, 10 + count),
        step=np.arange(count),
        started_s=np.zeros(count),
        step_us=np.array(step_us),
        wall_us=np.array(step_us) * 10,
        batch_tokens=np.array(batch),
        num_by_placement=by_place,
        layer_us=layer_us,
        cpu_us=layer_us * 0.9,
        gpu_us=layer_us * 0.1,
        predicted_us=layer_us / 2,
        experts=np.arange(count * 4).reshape(count, 2, 2).astype(np.int32),
        placement=placement,
        weights=np.full((count, 2, 2), 0.5, np.float32),
    )


def test_the_explanation_names_what_was_unusual() -> None:
    upload = queries.Upload(1, -1, 0, 5, 0, 2_000_000, 10.0, 40.0, 95.0, queries.UploadReason.DEMAND, 0, 0)
    text = "\n".join(
        explanation.sentences(tokens([200.0, 800.0, 200.0], [1, 40, 1]), 1, [upload], emulated=True)
    )
    assert "**8.0 ms**, 4.0 × this request's median (2.0 ms)" in text
    assert "On the emulated clock: 800 µs, 4.0 × this request's median (200 µs)" in text
    assert "**39 other tokens** (usually 0) — a prompt was prefilled" in text
    assert "**3 of its 4 routed experts were not on the GPU** (median of this request: 0)" in text
    assert "2 ran on the CPU, 1 were fetched" in text
    assert (
        "The experts of layer **0** took longest: 700 µs, 92% of 760 µs in all layers (its median: 100 µs); "
        "the layer waited for the CPU" in text
    )
    assert "1 expert (2.0 MB) over PCIe in 55 µs, 1 on demand" in text
    assert "the longest wait for the link was 30 µs" in text
    assert "No comparison with the cost model" in text
    assert "380 µs" not in text


def test_the_explanation_of_an_ordinary_token_invents_nothing() -> None:
    text = "\n".join(explanation.sentences(tokens([200.0, 800.0, 200.0], [1, 1, 1]), 0, [], emulated=False))
    assert "close to this request's median" in text
    assert "emulated" not in text
    assert "It was the only token of the step." in text
    assert "**0 of its 4 routed experts were not on the GPU**" in text
    assert "No expert was copied over PCIe" in text
    assert "predicted 75 µs for its experts; they took 150 µs (+100%)" in text


def test_lost_steps_are_reported_as_lost() -> None:
    made = tokens([float("nan"), 800.0, 200.0], [0, 1, 1])
    assert "not recorded" in explanation.sentences(made, 0, [], emulated=False)[0]


def test_the_layer_table_shows_every_routed_expert() -> None:
    table = explanation.layer_table(tokens([200.0, 800.0, 200.0], [1, 1, 1]), 1, emulated=False)
    for expert, color in ((4, palette.CPU), (5, palette.FETCHED), (6, palette.HIT), (7, palette.CPU)):
        assert f'background:{color};color:{palette.text_on(color)}">{expert} <small>0.50' in table
    assert "predicted" in table
    made = tokens([200.0, 800.0, 200.0], [1, 1, 1])
    assert "predicted" not in explanation.layer_table(made, 1, emulated=True)


def test_the_parts_of_a_step_are_shown_with_their_clock_and_sum_to_it() -> None:
    parts = {"schedule": 10.0, "attention": 30.0, "experts_cpu": 50.0, "router": 0.0, "rest": 10.0}
    usual = step_figures(wall_us=80.0, parts_us=parts | {"experts_cpu": 30.0})
    shown = explanation.step_time_bars((step_figures(wall_us=100.0, parts_us=parts), usual), None)
    assert re.findall(r"<td>([\d.]+)%?</td><td>([\d.]+)%</td><td>(\d+)</td>", shown) == [
        ("50", "50.0", "30"),
        ("30", "30.0", "30"),
        ("10", "10.0", "10"),
        ("10", "10.0", "10"),
    ]
    assert "the step on the wall clock" in shown
    assert "<b>100</b>" in shown
    assert "routers" not in shown, "what took no time has no row"
    assert "emulated" not in shown
    assert "queue" not in shown
    emulated = step_figures(wall_us=100.0, parts_us=parts, emulated_us={"dense": 2.0, "link": 6.0})
    both = explanation.step_time_bars((emulated, emulated), queue_s=0.25)
    assert "the step on the emulated clock" in both
    assert both.index("the wall clock of this machine, which emulates the GPU") < both.index(
        "waiting for the link"
    )
    assert "waited 250 ms in the queue" in both
    assert "not stored" in explanation.step_time_bars(None, None)


def test_every_part_that_is_stored_has_words() -> None:
    assert set(explanation.PART_NAMES) == {*STEP_PARTS, *EMULATED_PARTS, "rest"}


def upload(reason: queries.UploadReason, begin_us: float, end_us: float) -> queries.Upload:
    return queries.Upload(1, -1, 0, 5, 0, 2_000_000, 0.0, begin_us, end_us, reason, 0, 0)


def test_copies_are_drawn_in_lanes_and_none_over_another() -> None:
    demand, prefetch = queries.UploadReason.DEMAND, queries.UploadReason.PREFETCH
    # Two prefetches far apart among many demands: Plotly once made their bars as tall as all that lay between.
    uploads = [upload(prefetch, 0, 50), *(upload(demand, 50 + 10 * i, 60 + 10 * i) for i in range(12))]
    uploads += [upload(prefetch, 170, 220), upload(demand, 165, 175), upload(prefetch, 200, 230)]
    figure = figures_request.upload_timeline(uploads).built()
    bars = [
        (trace.name, y - width / 2, y + width / 2, base, base + x)
        for trace in figure.data
        for y, width, base, x in zip(trace.y, trace.width, trace.base, trace.x, strict=True)
    ]
    assert len(bars) == len(uploads)
    for index, (name, low, high, begin, end) in enumerate(bars):
        assert high - low < 1
        for other, other_low, other_high, other_begin, other_end in bars[:index]:
            assert (
                other_high <= low
                or high <= other_low
                or other_end <= begin + 1e-9
                or end <= other_begin + 1e-9
            )
            assert other == name or other_high <= low or high <= other_low
    assert list(figure.layout.yaxis.ticktext) == ["demand", "", "prefetch", ""]


def test_estimates_are_drawn_where_they_are_informative() -> None:
    times = np.array([10.0, 20.0])
    assert "predicted" in [
        trace.name for trace in figures_request.layer_times(times, times, times, times).built().data
    ]
    assert "predicted" not in [
        trace.name for trace in figures_request.layer_times(times, times, times, None).built().data
    ]


def test_every_colour_means_one_thing_and_shows_on_both_backgrounds() -> None:
    meanings = {
        name: value
        for name, value in vars(palette).items()
        if name.isupper() and isinstance(value, str) and value.startswith("#")
    }
    assert len(set(meanings.values())) == len(meanings) >= 8
    for color in meanings.values():
        assert palette.contrast(color, palette.text_on(color)) >= 4.5
        assert palette.contrast(color, "#1a202a") >= 2.9
        assert (
            palette.contrast(color, "#ffffff") >= 2.1
        )  # Okabe and Ito's orange; its areas carry names besides
    separate = np.array([1.7e9, 1.7e9 + 1])
    for chart in (
        figures.area(separate, separate, name="a", unit="b"),
        figures.queue(separate, separate, separate),
    ):
        figure = chart.built()
        hues = {trace.line.color for trace in figure.data} - {None}
        assert hues == {palette.QUANTITY}
        assert "#1f2937" not in figure.to_json()  # a text colour of one theme only
