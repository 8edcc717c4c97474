"""A run as one HTML file, without a server: to attach to an issue or a paper. `twofold report` runs this file."""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from twofold.api.errors import TwofoldError
from twofold.api.whole_file import whole_file
from twofold.telemetry import queries
from twofold.telemetry.summary import format_summary, summarise

from dashboard import formats
from dashboard.figures import base, cache, times
from dashboard.figures.chart import Chart
from dashboard.verdict import read_gbps, verdict

_BUCKETS: Final = 150
_STYLE: Final = """
:root { color-scheme: light; } body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
padding: 0 1rem; color: #1a1a1a; } h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0; }
pre { background: #f4f4f4; padding: 1rem; overflow-x: auto; }
.emulated { border: 2px solid #9a5b00; padding: .5rem 1rem; }
"""
_Titled = tuple[str, Chart]


def page(url: str, run_id: int | None) -> str:
    """The report of a run; None: the last one. Raises ConfigError if there is no database or no such run."""
    db = queries.open_database(url)
    run = queries.find_run(db, run_id)
    span = queries.window(run)
    overview = queries.RunHistory(db, run).overview(span, max_buckets=_BUCKETS)
    name = html.escape(formats.last_part(run.model))
    title = f"{name}, run {run.run_id}, {formats.moment(run.started_s, with_date=True)}"
    lines = [f"<h1>{title}</h1>"]
    if run.emulated:
        lines.append(
            f'<p class="emulated"><b>Emulated.</b> {html.escape(run.accelerator)}: times of the GPU and its link are '
            "predicted on a virtual clock, not measured.</p>"
        )
    parts_s = {part: float(values.sum()) for part, values in overview.part_seconds.items()}
    ceiling = queries.machine_facts(run).read_gb_per_s
    lines.append(f"<p>{html.escape(verdict(parts_s, read_gbps(run, overview), ceiling))}</p>")
    lines.append(f"<pre>{html.escape(format_summary(summarise(url, run_id=run.run_id)))}</pre>")
    for heading, chart in _charts(db, run, overview):
        figure = go.Figure(chart.built().to_plotly_json())  # checked, unlike a chart of the page
        figure.update_layout(template="plotly_white")
        body = plotly.io.to_html(
            figure, include_plotlyjs=False, full_html=False, config={"displaylogo": False}
        )
        lines.append(f"<h2>{html.escape(heading)}</h2>\n{body}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head>\n<body>{''.join(lines)}</body></html>\n"
    )


def _charts(db: queries.Database, run: queries.Run, overview: queries.Overview) -> Iterator[_Titled]:
    at_client = queries.client_times(db, run, overview.window)
    yield (
        "Tokens per second",
        times.speed(overview.at_s, overview.decode_tokens_per_s, overview.prefill_tokens_per_s),
    )
    gaps = queries.token_gaps(db, run, overview.window)
    for name, at_s, values_s in (
        ("Time to first token (TTFT), ms", at_client.finished_s, at_client.ttft_s),
        ("Gap between tokens (ITL), ms", gaps.at_s, gaps.gap_s),
    ):
        yield name, base.percentiles(queries.percentile_series(at_s, values_s * 1e3))
    yield (
        "Where the wall time of steps goes, %",
        times.parts(overview.at_s, overview.part_seconds, bucket_s=overview.bucket_s),
    )
    yield (
        "Concurrent requests",
        base.queue(overview.at_s, overview.num_running, overview.num_waiting),
    )
    if not run.has_slots:
        return
    grid, _ = queries.RunHistory(db, run).placements(overview.window)
    yield (
        "Placement of routed experts, %",
        base.shares(overview.at_s, overview.shares, bucket_s=overview.bucket_s),
    )
    yield "Hit rate by layer, %", cache.by_layer(cache.hits_of(grid))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--run", type=int)
    args = parser.parse_args(arguments)
    try:
        text = page(args.url, args.run)
        with whole_file(args.file) as part:
            part.write_text(text, encoding="utf-8")
    except (TwofoldError, OSError) as error:
        print(f"twofold report: {error}", file=sys.stderr)
        return 2
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
