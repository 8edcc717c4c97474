"""Accessibility of a page in Chromium by axe-core, which the extra `axe` installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from scripts.headless_chromium import DevTools
from tests.e2e.waiting import wait_until

_FOUND: Final = importlib.util.find_spec("axe_playwright_python")


def serious_findings(tools: DevTools) -> list[str]:
    """Serious and critical findings on the page that is open: the rule and the elements; none where axe is missing."""
    if _FOUND is None or not _FOUND.submodule_search_locations:
        return []
    folder = Path(next(iter(_FOUND.submodule_search_locations)))
    tools.evaluate((folder / "axe.min.js").read_text(encoding="utf-8") + "; 1")
    tools.evaluate("axe.run().then(found => { window.found = found.violations; }); 1")
    wait_until(lambda: tools.evaluate("window.found !== undefined"), limit_s=60)
    found = tools.evaluate(
        "found.filter(each => ['serious', 'critical'].includes(each.impact))"
        ".map(each => each.id + ': ' + each.nodes.map(node => node.html).join(' '))"
    )
    tools.evaluate("delete window.found")
    return list(found)
