"""The local cache of a hub, in the layout of `huggingface_hub`, which other programs share.

models--ORG--REPO/refs/REVISION       the commit of a branch or tag
                 /snapshots/COMMIT/   links to blobs, by their names in the repository
                 /blobs/HASH          contents; HASH.incomplete while they are downloaded
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.regular_file import read_regular_text
from twofold.hub.reference import HubModel
from twofold.hub.variants import INDEX, Variant, gguf_variants, safetensors_variant

_FOLDER: Final = "models--"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_YES: Final = frozenset(("1", "on", "yes", "true"))


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES


def cache_dir() -> Path:
    """The cache's directory, by the environment variables of `huggingface_hub`."""
    if given := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


@dataclass(frozen=True)
class RepoFolder:
    """The cache of one repository."""

    path: Path

    @classmethod
    def of(cls, repo: str) -> RepoFolder:
        return cls(cache_dir() / f"{_FOLDER}{repo.replace('/', '--')}")

    @property
    def repo(self) -> str:
        return self.path.name.removeprefix(_FOLDER).replace("--", "/")

    def commit_of(self, revision: str) -> str | None:
        """The commit of a revision that was fetched before; None if none was."""
        if _COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else None
        try:
            return read_regular_text(self.path / "refs" / revision).strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def snapshot(self, commit: str) -> Path:
        return self.path / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.path / "blobs" / digest

    def link(self, commit: str, name: str, digest: str) -> None:
        """Make the blob a file of the snapshot."""
        place = self.snapshot(commit) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.relpath(self.blob(digest), place.parent))

    def set_commit(self, revision: str, commit: str) -> None:
        """Record the commit of a branch or tag."""
        if revision == commit:
            return
        ref = self.path / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, "utf-8")

    def files(self, commit: str) -> list[str]:
        """Names of the snapshot's files that are complete."""
        root = self.snapshot(commit)
        return sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())

    def complete_variants(self, commit: str) -> list[Variant]:
        """Models whose files are all in the snapshot."""
        names = self.files(commit)
        plain = safetensors_variant(names)
        is_whole = plain is not None and set(self._indexed(commit)) <= set(names)
        return [*([plain] if plain is not None and is_whole else []), *gguf_variants(names)]

    def _indexed(self, commit: str) -> list[str]:
        """Weight files that the snapshot's index names; none without an index."""
        try:
            index = json.loads(read_regular_text(self.snapshot(commit) / INDEX))
            return sorted(set(index["weight_map"].values()))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return [f"{INDEX} is damaged"]  # no file has that name: the snapshot is incomplete


@dataclass(frozen=True)
class CachedModel:
    """A complete model in the cache."""

    folder: RepoFolder
    commit: str
    variant: Variant

    @property
    def path(self) -> Path:
        """Path as `open_model_files` takes it."""
        return self.folder.snapshot(self.commit) / self.variant.entry

    @property
    def name(self) -> HubModel:
        quant = self.variant.quant if self.variant.entry else None
        return HubModel(self.folder.repo, quant, self.commit)

    @property
    def num_bytes(self) -> int:
        root = self.folder.snapshot(self.commit)
        return sum((root / name).stat().st_size for name in self.variant.files)


def cached_models() -> Iterator[CachedModel]:
    """Every complete model in the cache, by name."""
    for path in sorted(cache_dir().glob(f"{_FOLDER}*")):
        folder = RepoFolder(path)
        for snapshot in sorted((path / "snapshots").glob("*")):
            for variant in folder.complete_variants(snapshot.name):
                yield CachedModel(folder, snapshot.name, variant)


def remove(model: CachedModel) -> int:
    """Delete a model's files, and blobs that no other snapshot needs. Returns the bytes freed.

    A projector is deleted with the last model that uses it.
    """
    folder, root = model.folder, model.folder.snapshot(model.commit)
    others = [each for each in folder.complete_variants(model.commit) if each != model.variant]
    names = [
        name
        for name in model.variant.downloads
        if name not in {each for other in others for each in other.downloads}
    ]
    targets = [(root / name).resolve() for name in names]
    for name in names:
        (root / name).unlink()
    needed = {file.resolve() for file in (folder.path / "snapshots").rglob("*") if file.is_symlink()}
    freed = 0
    for target in targets:
        if target.exists() and target not in needed:
            freed += target.stat().st_size
            target.unlink()
    if not folder.files(model.commit):
        _drop_commit(folder, model.commit)
    return freed


def _drop_commit(folder: RepoFolder, commit: str) -> None:
    """Remove an empty snapshot, the revisions that name it, and a repository without snapshots."""
    _remove_empty(folder.snapshot(commit))
    refs = [file for file in (folder.path / "refs").rglob("*") if file.is_file()]
    for ref in refs:
        if read_regular_text(ref).strip() == commit:
            ref.unlink()
    if not any((folder.path / "snapshots").iterdir()):
        for unfinished in folder.path.glob("blobs/*.incomplete"):
            unfinished.unlink()
        _remove_empty(folder.path)


def _remove_empty(directory: Path) -> None:
    """Remove a tree of directories without files; directories with files stay."""
    below = sorted((each for each in directory.rglob("*") if each.is_dir()), reverse=True)
    for each in (*below, directory):
        if not any(each.iterdir()):
            each.rmdir()
