"""Names that scripts, notebooks and other programs may rely on, pinned: a change here changes the interface."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
from twofold.api import errors, types
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig

PUBLIC = {
    "twofold": ["__version__"],
    "twofold.engine": ["Engine", "EngineStats"],
    "twofold.api.config": ["EngineConfig", "ServerConfig", "TelemetryConfig"],
    "twofold.api.types": [
        "Chunk",
        "GenerationRequest",
        "PlacementCounts",
        "RunInfo",
        "SamplingParams",
        "Usage",
    ],
    "twofold.api.errors": [
        "TwofoldError",
        "ConfigError",
        "ModelLoadError",
        "RequestError",
        "CapacityError",
        "KernelError",
    ],
    "twofold.step.model": ["BatchMeta", "LoadedModel", "load_model"],
    "twofold.models": ["LoadProgress", "ModelConfig", "read_config"],
    "twofold.text.tokenizer": ["Tokenizer"],
    "twofold.telemetry.sink": ["NullSink", "TelemetrySink"],
    "twofold.models.bundled": ["bundled_model_path"],
    "tests.tiny_models.writing": ["TinyModel", "write_tiny_model"],
    "twofold.tools.cli.main": ["main"],
}
ENGINE_METHODS = {
    "load": ["config", "telemetry", "progress"],
    "submit": ["self", "request"],
    "cancel": ["self", "request_id"],
    "start": ["self"],
    "drain": ["self", "timeout_s"],
    "close": ["self"],
    "generate": ["self", "prompt_token_ids", "sampling", "on_chunk", "request_id", "endpoint", "constraint"],
    "stats": ["self"],
    "step": ["self"],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module: str) -> None:
    if module in {"twofold.engine", "twofold.step.model"}:
        pytest.importorskip("twofold._core", reason="the native module is not built")
    present = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(present, name)] == []


def test_the_engines_methods_take_what_they_took() -> None:
    pytest.importorskip("twofold._core", reason="the native module is not built")
    engine = importlib.import_module("twofold.engine").Engine
    taken = {}
    for name in ENGINE_METHODS:
        taken[name] = list(inspect.signature(getattr(engine, name)).parameters)
    assert taken == ENGINE_METHODS


def test_every_error_is_a_twofold_error_and_says_so_in_one_hierarchy() -> None:
    ours = [
        value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert {cls.__name__ for cls in ours} >= set(PUBLIC["twofold.api.errors"])
    assert all(issubclass(cls, errors.TwofoldError) for cls in ours)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, TelemetryConfig])
def test_settings_are_frozen_and_every_field_explains_itself(config: type) -> None:
    assert dataclasses.fields(config)
    assert config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert [field.name for field in dataclasses.fields(config) if not field.metadata.get("help")] == []


def test_what_crosses_modules_is_frozen() -> None:
    classes = [
        value for value in vars(types).values() if dataclasses.is_dataclass(value) and inspect.isclass(value)
    ]
    assert len(classes) >= 6
    assert [cls.__name__ for cls in classes if not cls.__dataclass_params__.frozen] == []  # type: ignore[attr-defined]
