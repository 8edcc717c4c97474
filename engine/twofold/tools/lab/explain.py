"""Explains each cell of a simulation in which a peer's rule is faster than ours: by how much, and what differs.

The explanations use only the two rows' counts; the choice of a rule is left to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from twofold.experts.policies import POLICIES

Row = Mapping[str, Any]

_EVEN: Final = 0.001
"""Shares closer than this count as equal."""


def where_peers_win(rows: Sequence[Row]) -> list[str]:
    """A line per cell (trace, machine, batch, slots) in which a peer reaches more tokens per second than Twofold."""
    cells: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["trace"], row["profile"], row["batch"], row["slots"]), []).append(row)
    lines = []
    for (trace, machine, batch, slots), cell in cells.items():
        ours = next((row for row in cell if row["system"] == "twofold"), None)
        best = max(cell, key=lambda row: float(row["tokens_per_s"]))
        if ours is None or best["tokens_per_s"] <= ours["tokens_per_s"]:
            continue
        gain = best["tokens_per_s"] / ours["tokens_per_s"] - 1
        where = f"{trace}, {machine}, batch {batch}, {slots:.0%} slots"
        why = "; ".join(_differences(ours, best))
        lines.append(f"{where}: {best['system']} is {gain:.1%} faster than twofold: {why}")
    return lines


def _differences(ours: Row, theirs: Row) -> list[str]:
    """Differences of the faster rule, the largest effect on misses first."""
    reasons = []
    more_hits = theirs["hit_rate"] - ours["hit_rate"]
    uploads = theirs["uploads_per_token"] - ours["uploads_per_token"]
    if more_hits > _EVEN:
        if POLICIES[theirs["policy"]].prefetches == "never":
            how = (
                "its experts were chosen from the other half of this very trace, ours are learnt as it plays"
            )
        elif uploads > 0:
            how = f"for {uploads:.2f} uploads more per token, which our price of an upload refuses"
        else:
            how = "its choice of what to keep fits this trace better"
        reasons.append(f"it hits {100 * more_hits:.1f} points more ({how})")
    if uploads < 0 and theirs["link_busy"] < ours["link_busy"]:
        reasons.append(
            f"it uploads {-uploads:.2f} less per token, which leaves more of the memory's bandwidth to the CPU "
            f"(link {theirs['link_busy']:.0%} busy, ours {ours['link_busy']:.0%})"
        )
    fetched = theirs["fetched_per_token"] - ours["fetched_per_token"]
    if abs(fetched) > _EVEN:
        word = "more" if fetched > 0 else "fewer"
        reasons.append(f"it waits for {abs(fetched):.2f} {word} fetched experts per token")
    return reasons or ["the same hits and uploads, in another order within the layers"]
