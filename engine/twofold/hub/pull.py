"""Finds a named model in the local cache, or downloads it.

A complete model in the cache is used without asking the hub, so that a server restarts with the same weights.
`pull_model` asks for the revision's newest commit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.hub.cache import CachedModel, RepoFolder, cache_dir, is_offline
from twofold.hub.download import Download
from twofold.hub.reference import HubModel
from twofold.hub.remote import Listing, list_repository
from twofold.hub.variants import USUAL_QUANT, choose_variant, tokenizer_files

_RESERVED_BYTES: Final = 256 * 2**20
"""Disk space that stays free after a download."""


@dataclass(frozen=True)
class Report:
    """How a download reports: lines for the user, and bytes (done, total, file)."""

    line: Callable[[str], None] = lambda text: None
    progress: Callable[[int, int, str], None] = lambda done, total, name: None


def find_cached(model: HubModel) -> CachedModel | None:
    """The complete model in the cache; None if it is missing."""
    folder = RepoFolder.of(model.repo)
    commit = folder.commit_of(model.revision)
    variants = folder.complete_variants(commit) if commit else []
    if commit is None or not variants:
        return None
    try:
        chosen = choose_variant(model, [name for variant in variants for name in variant.downloads])
    except ModelLoadError:
        return None  # the cache has other variants of this repository
    if model.quant is None and chosen.entry and chosen.quant != USUAL_QUANT and not is_offline():
        return None  # the only one in the cache; the repository may have others
    return CachedModel(folder, commit, chosen)


def local_model(model: HubModel, report: Report) -> CachedModel:
    """The model from the cache, else downloaded. ModelLoadError: it cannot be had; one line."""
    found = find_cached(model)
    if found is not None:
        report.line(f"{model} at commit {found.commit[:12]} ({model.revision}), from {found.path}")
        return found
    return pull_model(model, report)


def pull_model(model: HubModel, report: Report) -> CachedModel:
    """Download what the cache lacks of the revision's newest commit. Offline: what is in the cache.

    Raises:
        ModelLoadError: unknown or gated repository, no such quantisation, no network, or not enough disk space.
    """
    if is_offline():
        found = find_cached(model)
        if found is None:
            raise ModelLoadError(
                f"{model}@{model.revision} is not in {cache_dir()}, and HF_HUB_OFFLINE forbids to fetch it; unset it, "
                "or name one that `twofold list` shows"
            )
        return found
    listing = list_repository(model)
    variant = choose_variant(model, list(listing.files))
    _fetch(model, listing, variant.downloads, report)
    return CachedModel(RepoFolder.of(model.repo), listing.commit, variant)


def local_tokenizer(model: HubModel, report: Report) -> Path:
    """Directory with the tokenizer and chat template of a model, without its weights."""
    folder = RepoFolder.of(model.repo)
    commit = folder.commit_of(model.revision)
    if commit is None or not tokenizer_files(folder.files(commit)):
        if is_offline():
            raise ModelLoadError(
                f"{model.repo} is not in {cache_dir()}, and HF_HUB_OFFLINE forbids to fetch it; unset it"
            )
        listing = list_repository(model)
        _fetch(model, listing, tokenizer_files(listing.files), report)
        commit = listing.commit
    return folder.snapshot(commit)


def _fetch(model: HubModel, listing: Listing, names: Iterable[str], report: Report) -> None:
    downloads = [Download(model, listing.commit, name, listing.files[name]) for name in names]
    folder = RepoFolder.of(model.repo)
    missing = sum(each.missing_bytes for each in downloads)
    total = sum(each.file.size for each in downloads)
    _make_room(model, downloads, missing, total, report)
    done = 0
    for each in downloads:

        def show(count: int, name: str = each.name) -> None:
            nonlocal done
            done += count
            report.progress(done, total, name)

        each.run(show)
        folder.link(listing.commit, each.name, each.file.digest)
    folder.set_commit(model.revision, listing.commit)


def _make_room(model: HubModel, downloads: list[Download], missing: int, total: int, report: Report) -> None:
    """Report the sizes; ModelLoadError if the disk is too small."""
    place = cache_dir()
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise ModelLoadError(
            f"the cache {place} cannot be written: {error.strerror}; name another directory in HF_HUB_CACHE"
        ) from error
    commit = downloads[0].commit[:12] if downloads else ""
    report.line(
        f"{model} at commit {commit} ({model.revision}): {len(downloads)} files, {_gb(total)}; {_gb(missing)} to "
        f"download to {place} ({_gb(free)} free)"
    )
    if missing and missing + _RESERVED_BYTES > free:
        raise ModelLoadError(
            f"{model} needs {_gb(missing)} more in {place}, which has {_gb(free)} free; free space, name another disk "
            "in HF_HUB_CACHE, or choose a smaller quantisation"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
