"""Drafters: each proposes a request's next tokens, which a step then verifies. One file per drafter.

To add one: its file, a row here, its name in `api.speculative_config.METHODS`.
"""

from __future__ import annotations

import importlib
from typing import Final, cast

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.drafters.drafter import Drafter

_DRAFTERS: Final = {
    "ngram": "NgramDrafter",
    "prediction": "PredictionDrafter",
    "suffix": "SuffixDrafter",
}
"""Class of each drafter in the module of its name."""
WITH_MODEL: Final = ("mtp", "draft_model", "eagle3")
"""Drafters that compute with a model: loading makes them (`EngineParts.drafter`)."""


def open_drafter(name: str, config: SpeculativeConfig) -> Drafter:
    """Import the drafter `name` and make one."""
    module = importlib.import_module(f"twofold.step.drafters.{name}")
    return cast(Drafter, getattr(module, _DRAFTERS[name])(config))
