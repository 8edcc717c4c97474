"""Asks a hub for a repository's commit and files. Every failure is one line that says what to do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ModelLoadError
from twofold.hub.reference import HubModel

_HEX: Final = re.compile(r"[0-9a-f]{80,104}")
"""A hash of 40 or 64 digits, then a commit."""


class NetworkError(ModelLoadError):
    """The hub did not answer, or stopped; a further attempt may help."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository."""

    size: int
    digest: str
    """Name of its blob: SHA-256 of a large file, Git's SHA-1 of a small one."""
    is_large: bool


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]


def list_repository(model: HubModel) -> Listing:
    """The files of a model's repository. ModelLoadError as `explained`."""
    from huggingface_hub import HfApi

    with explained(model):
        info = HfApi().model_info(model.repo, revision=model.revision, files_metadata=True)
        files = {}
        for each in info.siblings or ():
            digest = each.lfs.sha256 if each.lfs else each.blob_id
            # Name, hash and commit become parts of paths.
            is_safe = not each.rfilename.startswith("/") and ".." not in each.rfilename.split("/")
            if each.size is None or not is_safe or not _HEX.fullmatch(f"{digest}{info.sha}"):
                raise ModelLoadError(
                    f"{model.repo}: the hub sent no size or no hash of {each.rfilename!r}, or a name outside the "
                    "repository; check HF_ENDPOINT"
                )
            files[each.rfilename] = RemoteFile(each.size, str(digest), each.lfs is not None)
        return Listing(str(info.sha), files)


@contextlib.contextmanager
def explained(model: HubModel) -> Iterator[None]:
    """Turn the client's errors into ModelLoadError: unknown or gated repository, unknown revision, no network."""
    from huggingface_hub import errors

    # The client library's base class: httpx's, which has another package name in each major version.
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    token = "is set" if os.environ.get("HF_TOKEN") else "is not set"
    try:
        yield
    except errors.GatedRepoError:
        raise ModelLoadError(
            f"{model.repo} is gated: accept its conditions on its page, then give a token of that account in "
            f"HF_TOKEN (which {token})"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"{model.repo}: the hub has no such repository, or it is private; check the name, and for a private one "
            f"give a token in HF_TOKEN (which {token})"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelLoadError(
            f"{model.repo} has no revision {model.revision!r}; give a branch, tag or commit that its page lists"
        ) from None
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{model.repo} is no repository name ({error}); expected ORG/REPO") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelLoadError(
            f"{model.repo}: the answer was no description of a repository, as when a proxy or a login page answers in "
            "place of the hub; check HF_ENDPOINT and the proxy"
        ) from None
    except (http_error, ConnectionError) as error:
        raise NetworkError(
            f"{model.repo}: the hub did not answer ({_first_line(error)}); check the network, HF_ENDPOINT and the "
            "proxy, and run the command again: what was downloaded is kept"
        ) from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
