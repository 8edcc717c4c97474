"""Location of the bundled model: beside the modules when installed, under models/ in a source tree."""

from __future__ import annotations

from pathlib import Path

from twofold.api.errors import ModelLoadError

BUNDLED_MODEL_NAME = "twofold-tales"


def bundled_model_path() -> Path:
    """The directory of the bundled model, in Hugging Face layout.

    Raises:
        ModelLoadError: neither the installed package nor the source tree has it.
    """
    package = Path(__file__).resolve().parents[1]
    places = (
        package / "bundled_models" / BUNDLED_MODEL_NAME,
        package.parents[1] / "models" / BUNDLED_MODEL_NAME,
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ModelLoadError(
        f"the bundled model is in neither {places[0]} nor {places[1]}; "
        "name a model directory, or install Twofold again"
    )
