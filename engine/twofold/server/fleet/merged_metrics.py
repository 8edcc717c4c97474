"""The /metrics pages of all replicas as one page, each series with its replica's label."""

from __future__ import annotations

from collections.abc import Mapping

from twofold.server.bridge.observe.metrics import label_text


def merged_metrics(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format from the replicas' pages by replica id."""
    metrics: dict[str, list[str]] = {}
    for replica, page in sorted(pages.items()):
        label, series, is_new = label_text(replica=replica), [""], False
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in metrics
                series = metrics.setdefault(name, [])
            if not line.startswith("#"):
                name, braces, rest = line.partition("{")
                series.append(f"{name}{{{label},{rest}" if braces else _labelled(line, label))
            elif is_new:
                series.append(line)
    return "".join(f"{line}\n" for series in metrics.values() for line in series)


def _labelled(line: str, label: str) -> str:
    """A series without labels, with one."""
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
