"""Metrics of speculative decoding, with vLLM's names."""

from __future__ import annotations

from twofold.api.types import EngineStats
from twofold.server.bridge.metrics import Gauge, label_text


def speculation_gauges(stats: EngineStats) -> list[Gauge]:
    """Counts since the start; none before the first draft."""
    counts = stats.speculation
    if not counts:
        return []
    by_position = {
        label_text(position=name.removeprefix("accepted_")): float(count)
        for name, count in sorted(counts.items())
        if name.startswith("accepted_")
    }
    return [
        ("vllm:spec_decode_num_drafts_total", "Verified drafts.", counts["drafts"]),
        ("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens.", counts["drafted"]),
        ("vllm:spec_decode_num_accepted_tokens_total", "Accepted drafted tokens.", counts["accepted"]),
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted drafted tokens by their position in the draft, the first is 0.",
            by_position,
        ),
    ]
