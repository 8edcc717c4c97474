"""`twofold bench --speculative-config`: the same answers without drafts, in turn, and what the drafts were worth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from twofold.api.types import SpeculationCounts
from twofold.tools.cli.bench.speed import Speed, median_speed

if TYPE_CHECKING:
    from twofold.engine import Engine


class DraftedBench:
    """Answers of one prompt with and without drafts, from one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats().speculation or SpeculationCounts()
        self.off: list[Speed] = []

    def answer_off(self, answer: Callable[[], Speed], *, counts: bool) -> None:
        """Time an answer without drafts. counts: False for a warm-up."""
        speculator = self._engine.speculator
        assert speculator is not None, "an engine that drafts"
        speculator.is_paused = True
        speed = answer()
        speculator.is_paused = False
        if counts:
            self.off.append(speed)

    def begin(self) -> None:
        """Drafts from now on are measured."""
        self._before = self._engine.stats().speculation or SpeculationCounts()

    def as_json(self, on: Sequence[Speed]) -> dict[str, Any]:
        """Figures of the drafts since `begin`; speeds are ratios by round of the wall clock and of the run's clock."""
        now, before = self._engine.stats().speculation or SpeculationCounts(), self._before
        drafts = now.num_drafts - before.num_drafts
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        earlier = (*before.accepted_by_position, *[0] * len(now.accepted_by_position))
        by_position = [one - other for one, other in zip(now.accepted_by_position, earlier, strict=False)]
        decoded = sum(speed.new_tokens - 1 for speed in on)
        predicted_s, measured_s = now.predicted_s - before.predicted_s, now.measured_s - before.measured_s
        ratios = sorted(off.decode_s / own.decode_s for off, own in zip(self.off, on, strict=True))
        clock = [
            off.usage.decode_s / own.usage.decode_s
            for off, own in zip(self.off, on, strict=True)
            if off.usage and own.usage and own.usage.decode_s > 0
        ]
        return {
            "off": median_speed(self.off).as_json(),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_range": [ratios[0], ratios[-1]],
            "clock_ratio": statistics.median(clock) if clock else None,
            "num_drafts": drafts,
            "num_draft_tokens": now.num_draft_tokens - before.num_draft_tokens,
            "accepted_by_position": [count / max(drafts, 1) for count in by_position],
            "tokens_per_step": decoded / max(decoded - accepted, 1),
            "predicted_over_measured": predicted_s / measured_s if measured_s > 0 else None,
        }


def drafted_lines(found: dict[str, Any]) -> list[str]:
    """The figures as lines of the table."""
    low, high = found["speed_ratio_range"]
    clock = f", {found['clock_ratio']:.2f} on the run's clock" if found["clock_ratio"] else ""
    lines = [
        f"  with drafts / without: decode {found['speed_ratio']:.2f} ({low:.2f}-{high:.2f}){clock}; "
        f"{found['off']['decode_tokens_per_s']:.1f} tokens/s without"
    ]
    if not found["num_drafts"]:
        return [*lines, "  no drafts were verified: the price found none worth its time"]
    shares = " ".join(f"{share:.0%}" for share in found["accepted_by_position"]) or "none"
    priced = found["predicted_over_measured"]
    mean = found["num_draft_tokens"] / found["num_drafts"]
    lines.append(
        f"  drafts: {found['num_drafts']:,} of {mean:.1f} tokens; accepted by position {shares}; "
        f"{found['tokens_per_step']:.2f} tokens per step"
    )
    if priced is not None:
        lines.append(f"  steps with drafts: predicted / measured time {priced:.2f}")
    return lines
