"""The dashboard's pages in the order of the menu. A page is a file of this folder and its entry in PAGES."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Page:
    """A page: `name` is its file and its path in the address."""

    name: str
    title: str
    icon: str
    """Name of a Material symbol."""
    section: str


PAGES: Final = (
    Page("overview", "Overview", "monitoring", "Now"),
    Page("requests", "Requests", "search", "Now"),
    Page("slow_steps", "Slow steps", "hourglass_bottom", "Now"),
    Page("fleet", "Fleet", "hub", "Now"),
    Page("placement", "Placement", "grid_on", "Experts"),
    Page("pcie", "PCIe", "swap_horiz", "Experts"),
    Page("cache", "Cache", "memory", "Experts"),
    Page("scheduler", "Scheduler", "account_tree", "Experts"),
    Page("lab", "Lab", "science", "Tests"),
    Page("loadtests", "Load tests", "groups", "Tests"),
    Page("compare", "Compare", "compare_arrows", "Tests"),
    Page("training", "Training", "school", "Training"),
    Page("machine", "Machine", "memory", "Machine"),
)
