"""transformers' processor of a checkpoint's pictures, without its parts for video and sound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.models.registry import family_named
from twofold.weights.json_file import read_json_object

_FILES: Final = ("processor_config.json", "preprocessor_config.json", "config.json")


def picture_processor(folder: Path) -> Any:
    """The processor with the tokenizer and the image processor of a model directory. Its other parts are None: they
    need libraries that pictures do not.

    Raises:
        ConfigError: a package that scales pictures is not installed.
        ModelLoadError: a file is damaged, or transformers does not know the processor's class.
    """
    import transformers

    settings = [
        read_json_object(folder / name, "settings of pictures")
        for name in _FILES
        if (folder / name).is_file()
    ]
    _check_packages(folder, settings)
    kind = _processor_class(folder, settings)

    class PicturesAlone(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Parts that are left out are None."""

    auto: Any = transformers
    parts = dict.fromkeys(kind.get_attributes())
    parts |= {
        "image_processor": auto.AutoImageProcessor.from_pretrained(folder),
        "tokenizer": auto.AutoTokenizer.from_pretrained(folder),
    }
    stated = settings[0] if settings else {}
    taken = inspect.signature(kind.__init__).parameters
    return PicturesAlone(**{name: value for name, value in stated.items() if name in taken} | parts)


def _check_packages(folder: Path, settings: Sequence[Mapping[str, Any]]) -> None:
    names = [str(name) for each in settings for name in each.get("architectures") or ()]
    for family in filter(None, map(family_named, names)):
        try:
            version(family.pictures or "transformers")
        except PackageNotFoundError:
            raise ConfigError(
                f"{folder}: transformers scales this model's pictures with {family.pictures}, which is not installed; "
                f"pip install {family.pictures}"
            ) from None


def _processor_class(folder: Path, settings: Sequence[Mapping[str, Any]]) -> Any:
    """The class that a file names, else that of the model's type."""
    import transformers
    from transformers.models.auto import processing_auto

    by_type: dict[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    names = [str(each["processor_class"]) for each in settings if "processor_class" in each]
    names += [by_type[str(each["model_type"])] for each in settings if each.get("model_type") in by_type]
    for name in names:
        if (kind := getattr(transformers, name, None)) is not None:
            return kind
    raise ModelLoadError(
        f"{folder}: transformers has no processor of pictures named {', '.join(names) or 'in its files'}; a newer "
        "transformers may have it"
    )
