"""Ollama's /api/create and /api/blobs, as far as they serve a LoRA adapter: FROM and ADAPTER of a Modelfile.

`ollama create NAME -f Modelfile` sends the adapter's files first, each under its SHA-256, and then names them. They are
kept below --lora-dir, and the adapter is loaded under NAME. All of it needs the admin key, as other ways to load one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.whole_file import whole_file
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import small_body
from twofold.server.http.bodies import Body, ModelName, refused
from twofold.server.http.errors import ApiError, wrong_field
from twofold.server.ollama.model_card import served_name

_MAX_BODY: Final = 65_536
_MAX_BLOB: Final = 16 << 30
"""Bytes of one file of an adapter."""
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_ONLY_ADAPTERS: Final = "this server adds adapters to the model that it serves; send it with each request"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class OllamaCreateRequest(Body):
    """Body of POST /api/create."""

    model: Name | None = None
    name: Name | None = None
    """Older name of `model`."""
    from_: Annotated[ModelName | None, Field(alias="from")] = None
    adapters: Annotated[dict[FileName, str], Field(max_length=64)] = Field(default_factory=dict)
    """Digest of each file."""
    stream: bool | None = None
    """Streams by default."""
    system: refused(_ONLY_ADAPTERS) = None  # type: ignore[valid-type]
    template: refused(_ONLY_ADAPTERS) = None  # type: ignore[valid-type]
    parameters: refused(_ONLY_ADAPTERS) = None  # type: ignore[valid-type]
    messages: refused(_ONLY_ADAPTERS) = None  # type: ignore[valid-type]
    files: refused("models are served by `twofold serve MODEL`") = None  # type: ignore[valid-type]
    quantize: refused("use `twofold quantize`") = None  # type: ignore[valid-type]


def admin_router(state: ServerState) -> APIRouter:
    """The routes of the server's operator."""
    routes = APIRouter(prefix="/api", include_in_schema=False)

    @routes.head("/blobs/{digest}")
    async def blob_exists(digest: str) -> Response:
        return Response(status_code=200 if _blob(state, digest).is_file() else 404)

    @routes.post("/blobs/{digest}")
    async def put_blob(request: Request, digest: str) -> Response:
        await _receive(request, _blob(state, digest))
        return Response(status_code=201)

    @routes.post("/create")
    async def create(request: Request) -> Response:
        body = await small_body(request, OllamaCreateRequest, _MAX_BODY)
        name = (body.model or body.name or "").removesuffix(":latest")
        model = _base(state, body, name)
        await asyncio.to_thread(_load, state, model, name, body.adapters)
        done = {"status": "success"}
        if body.stream is False:
            return JSONResponse(done)
        lines = [{"status": "converting adapter"}, done]
        return Response("".join(f"{json.dumps(line)}\n" for line in lines), media_type="application/x-ndjson")

    return routes


def _base(state: ServerState, body: OllamaCreateRequest, name: str) -> ServedModel:
    """The model that the adapter is for. ApiError for a request that makes none."""
    if not name:
        raise wrong_field("model", "expected the new model's name")
    if not body.adapters:
        raise wrong_field(
            "adapters", "expected an adapter's files; other models are served by `twofold serve MODEL`"
        )
    model = state.find(served_name(state, body.from_ or ""))
    if name in model.names:
        raise wrong_field("model", f"{name!r} is the model's own name; give the adapter another one")
    return model


def _folder(state: ServerState) -> Path:
    """--lora-dir. ApiError 400 without it, and on a server of several models."""
    if state.manager is not None:
        raise ApiError(
            400, "adapters are served beside one model, and this server has several; serve it alone"
        )
    directory = state.default.engine.config.lora_dir
    if directory is None:
        raise ApiError(
            400,
            "this server keeps no adapters; start it with --lora-dir DIR to keep them below DIR",
            code="no_lora_dir",
        )
    return Path(directory).expanduser().resolve()


def _blob(state: ServerState, digest: str) -> Path:
    """Where a file with this digest lies. ApiError 400 if it is none."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise wrong_field("digest", f"{digest[:100]!r} is not sha256: and 64 hexadecimal digits")
    return _folder(state) / "blobs" / f"sha256-{match[1]}"


async def _receive(request: Request, path: Path) -> None:
    """Keep the body at `path`, whole or not at all. ApiError 400 if it has another digest, 413 if it is too large."""
    digest, size = hashlib.sha256(), 0
    await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
    with whole_file(path) as part, part.open("wb") as stream:
        async for arrived in request.stream():
            size += len(arrived)
            if size > _MAX_BLOB:
                raise ApiError(413, f"the file is larger than {_MAX_BLOB:,} bytes")
            await asyncio.to_thread(stream.write, arrived)
            digest.update(arrived)
        if path.name != f"sha256-{digest.hexdigest()}":
            raise wrong_field("digest", f"the body's is sha256:{digest.hexdigest()}")


def _load(state: ServerState, model: ServedModel, name: str, files: Mapping[str, str]) -> None:
    """Lay the files out as an adapter and load it; one of this name is replaced."""
    blobs = {file: _blob(state, digest) for file, digest in files.items()}
    for file, blob in blobs.items():
        if not blob.is_file():
            raise ApiError(
                404, f"adapters: {file} was not sent to /api/blobs/{files[file][:100]}", param="adapters"
            )
    content = json.dumps(sorted((file, blob.name) for file, blob in blobs.items()))
    folder = _folder(state) / "created" / hashlib.sha256(content.encode()).hexdigest()[:32]
    is_new = not folder.exists()
    if is_new:
        _link_all(blobs, folder)
    only = next(iter(files)) if len(files) == 1 else ""
    try:
        model.engine.adapters.load(name, folder / only)
    except (ConfigError, ModelLoadError, OSError) as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise ApiError(400, str(error), param="adapters", code="adapter_load_failed") from None


def _link_all(blobs: Mapping[str, Path], folder: Path) -> None:
    """Give the blobs their names in `folder`, which appears whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        part = Path(made) / "adapter"
        part.mkdir()
        for file, blob in blobs.items():
            os.link(blob, part / file)
        part.rename(folder)
