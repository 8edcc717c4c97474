"""Results of a comparison with other engines: text, file, and Markdown in docs/explanation/performance.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.ceilings import bounds
from benchmarks.peers.rounds import OURS, Series, rows

_PAGES: Final = Path(__file__).resolve().parents[2] / "docs"
DOCS: Final = _PAGES / "explanation" / "performance.md"
NOTEBOOK: Final = _PAGES / "notebook" / "performance.md"
BEGIN: Final = "<!-- {name}: made by {maker} -->"
END: Final = "<!-- end of {name} -->"


def as_report(
    series: Sequence[Series],
    left_out: Mapping[str, Mapping[str, str]],
    details: Mapping[str, Mapping[str, Any]],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything about the run as one JSON object. `run`: machine, command, shape, workload, ceilings, bytes."""
    return {
        **run,
        "rows": rows(series),
        "samples": [
            {
                "engine": s.engine,
                "format": s.format,
                "test": s.test,
                "tokens_per_s": s.samples,
                "quartiles": list(s.quartiles()),
                "ratios_per_round": s.ratios,
            }
            for s in series
        ],
        "left_out": {name: dict(reasons) for name, reasons in left_out.items()},
        "details": {name: dict(found) for name, found in details.items()},
    }


def table(report: Mapping[str, Any]) -> str:
    """Readable text: a line per engine, format and test, then the bounds."""
    lines = [
        f"{'engine':<14}{'format':<8}{'test':<8}{'tokens/s':>10}{'quartiles':>20}{'÷ twofold':>11}{'bound':>9}"
    ]
    spread = {(s["engine"], s["format"], s["test"]): s["quartiles"] for s in report["samples"]}
    for row in report["rows"]:
        low, high = spread[row["engine"], row["format"], row["test"]]
        ratio = row["ratio_to_twofold"]
        bound = bounds(report, row["format"]).get(row["test"][:2])
        lines.append(
            f"{row['engine']:<14}{row['format']:<8}{row['test']:<8}{row['tokens_per_s']:>10.1f}"
            f"{f'{low:.1f} - {high:.1f}':>20}{'-' if ratio is None else f'{ratio:.2f}':>11}"
            f"{'-' if bound is None else f'{bound:.0f}':>9}"
        )
    if ceilings := report["ceilings"]:
        lines.append(
            "measured in the same run: "
            + ", ".join(f"{name} {value:.0f}" for name, value in ceilings.items())
        )
    for format_name, reasons in report["left_out"].items():
        lines += [f"{format_name}: without {engine}: {why}" for engine, why in reasons.items()]
    return "\n".join(lines)


def markdown(report: Mapping[str, Any]) -> str:
    """The same as a Markdown table: a row per format and test, Twofold's speed as a multiple of each peer's."""
    spread = {(s["engine"], s["format"], s["test"]): s["quartiles"] for s in report["samples"]}
    speeds = {(r["engine"], r["format"], r["test"]): r["tokens_per_s"] for r in report["rows"]}
    engines = list(dict.fromkeys(r["engine"] for r in report["rows"]))
    cases = list(dict.fromkeys((r["format"], r["test"]) for r in report["rows"]))
    peers = [name for name in engines if name != OURS]

    def cell(engine: str, case: tuple[str, str]) -> str:
        speed = speeds.get((engine, *case))
        if speed is None:
            return "-"
        low, high = spread[engine, *case]
        return f"{speed:.1f} ({low:.1f}–{high:.1f})"

    def times(engine: str, case: tuple[str, str]) -> str:
        theirs, mine = speeds.get((engine, *case)), speeds.get((OURS, *case))
        return f"{mine / theirs:.2f}×" if theirs and mine else "-"

    head = ["format", "test", *engines, *(f"{OURS} ÷ {peer}" for peer in peers), "bound"]
    lines = [
        machine_line(report),
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for case in cases:
        bound = bounds(report, case[0]).get(case[1][:2])
        cells = [*case, *(cell(name, case) for name in engines), *(times(peer, case) for peer in peers)]
        cells.append("-" if bound is None else f"{bound:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    if report["ceilings"]:
        lines += ["", "Ceilings of the same run: " + _ceilings_line(report["ceilings"]) + "."]
    lines += [
        f"Without {engine} in {format_name}: {without_directories(why)}."
        for format_name, reasons in report["left_out"].items()
        for engine, why in reasons.items()
    ]
    return "\n".join(lines)


def without_directories(text: str) -> str:
    """Absolute paths cut to their last part: they say nothing to another machine."""
    return re.sub(r"(?<![\w….])/(?:[^\s/:;,'\"]+/)+([^\s/:;,'\"]+)", r"…/\1", text)


def machine_line(report: Mapping[str, Any]) -> str:
    """When, where and by which command."""
    machine = report["machine"]
    return (
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB: "
        f"`{report['command']}`"
    )


def _ceilings_line(ceilings: Mapping[str, float]) -> str:
    units = {"read_gb_per_s": "read {:.1f} GB/s"}
    return ", ".join(
        units.get(name, name.removesuffix("_gop_per_s").replace("_", " ") + " {:,.0f} Gop/s").format(value)
        for name, value in ceilings.items()
    )


def write_section(path: Path, name: str, maker: str, body: str) -> None:
    """Replace what stands between the two markers of `name` in the file. ValueError if it lacks them."""
    text = path.read_text(encoding="utf-8")
    begin, end = BEGIN.format(name=name, maker=maker), END.format(name=name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path} has not exactly one section between {begin!r} and {end!r}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{body.strip()}\n{end}{after}", encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    """A file that --report wrote. ValueError if it is none."""
    report = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or "rows" not in report:
        raise ValueError(f"{path} holds no report of benchmarks.peers")
    return report
