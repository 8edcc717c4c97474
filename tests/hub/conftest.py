"""A hub on loopback that the client of this process and its children use, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from twofold.hub import download

from tests.hub.small_hub import Repository, SmallHub, serving_hub
from tests.tiny_models.writing import write_tiny_model

huggingface_constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    monkeypatch.setattr(download, "RETRY_S", 0.0)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serving_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            huggingface_constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            served.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield served


@pytest.fixture
def tiny(hub: SmallHub, tmp_path: Path) -> SmallHub:
    """The hub with a model in several safetensors files, beside files that are never fetched."""
    model = write_tiny_model(tmp_path / "tiny")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    others = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"x" * 99, "README.md": b"#"}
    hub.repositories["test/Tiny-MoE"] = Repository(files | others)
    return hub


@pytest.fixture
def ggufs(hub: SmallHub) -> SmallHub:
    """The hub with quantisations of a model, one in two parts."""
    names = (
        "M-Q4_K_M.gguf",
        "M-Q8_0.gguf",
        "UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf",
        "UD-Q2_K_XL/M-UD-Q2_K_XL-00002-of-00002.gguf",
        "M-BF16-00001-of-00002.gguf",
        "mmproj-F16.gguf",
    )
    hub.repositories["test/Tiny-GGUF"] = Repository({name: name.encode() * 50 for name in names})
    return hub
