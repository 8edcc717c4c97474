"""What api/ declares: one hierarchy of errors, frozen settings that explain themselves, frozen records."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from twofold.api import errors, types
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig


def test_every_error_derives_from_twofold_error() -> None:
    ours = [
        value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert all(issubclass(cls, errors.TwofoldError) for cls in ours)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, TelemetryConfig])
def test_settings_are_frozen_and_every_field_explains_itself(config: type) -> None:
    assert dataclasses.fields(config)
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert [field.name for field in dataclasses.fields(config) if not field.metadata.get("help")] == []


def test_what_crosses_modules_is_frozen() -> None:
    classes = [
        value
        for value in vars(types).values()
        if inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__ == types.__name__
    ]
    assert len(classes) >= 6
    assert [cls.__name__ for cls in classes if not cls.__dataclass_params__.frozen] == []  # type: ignore[attr-defined]
