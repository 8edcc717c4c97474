"""Bytes of the pictures that requests hold or name: base64, data URLs, files below one directory, and allowed hosts.

A request is a stranger's. A URL is fetched only from a host that the operator allowed, at an address that was resolved
once, and every redirect is checked the same way: no request can make this server ask another machine of its network.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

from twofold.api.config import ServerConfig
from twofold.api.errors import RequestError
from twofold.api.picture_config import MAX_PICTURE_BYTES
from twofold.api.regular_file import read_regular

MAX_BYTES: Final = MAX_PICTURE_BYTES
"""Largest encoded picture."""
_TIMEOUT_S: Final = 20.0
"""Time limit of a fetch, redirects and body included."""
_MAX_REDIRECTS: Final = 3
_LOCAL_NAMES: Final = ("localhost",)

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that reach any IPv4 address, private ones too."""

Resolve = Callable[[str, int], Sequence[str]]


def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True)
class PictureSources:
    """Where requests may take pictures from."""

    hosts: frozenset[str]
    """Lower case."""
    folder: Path | None
    resolve: Resolve = _resolve
    """(host, port) → addresses."""

    @classmethod
    def of(cls, config: ServerConfig) -> PictureSources:
        hosts = (name.strip().lower() for given in config.allowed_media_domains for name in given.split(","))
        path = config.allowed_local_media_path
        folder = None if path is None else Path(path).expanduser().resolve()
        return cls(frozenset(filter(None, hosts)), folder)

    def read(self, url: str, where: str) -> bytes:
        """The encoded picture. Blocks. where: the field that holds it.

        Raises:
            RequestError: it is not allowed, cannot be reached, is too large or is no base64.
        """
        scheme = url[:8].partition(":")[0].lower()
        try:
            if scheme == "data":
                head, comma, data = url.partition(",")
                if not comma or not head.endswith(";base64"):
                    raise _RefusalError(
                        "a data URL was given that is not base64; expected data:image/png;base64,…"
                    )
                return _decoded(data)
            if scheme in ("http", "https"):
                return self._fetched(url)
            if scheme == "file":
                return self._file(url)
            return _decoded(url)
        except _RefusalError as refusal:
            raise RequestError(f"{where}: {refusal}", param=where) from None

    def _file(self, url: str) -> bytes:
        if self.folder is None:
            raise _RefusalError(
                "file URLs are read only below --allowed-local-media-path, which the server was started without; send "
                "the picture as a data URL"
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
        except ValueError as error:
            raise _RefusalError(f"the file URL is none ({error})") from None
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(self.folder):
            raise _RefusalError("the file is not below the directory of --allowed-local-media-path")
        try:
            data, size = read_regular(path, MAX_BYTES)
        except OSError as error:
            raise _RefusalError(f"the file cannot be read ({error.strerror})") from None
        if size > MAX_BYTES:
            raise _too_large()
        return _bounded(data)

    def _fetched(self, url: str) -> bytes:
        # Imported here: only servers that may fetch need it.
        import httpx

        async def within_time() -> bytes:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._followed(url)

        try:
            return asyncio.run(within_time())
        except TimeoutError:
            raise _RefusalError(f"the picture did not arrive within {_TIMEOUT_S:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = str(error)[:200] or type(error).__name__
            raise _RefusalError(f"the picture cannot be fetched ({reason})") from None

    async def _followed(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            answer = await self._answer(url)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise _RefusalError(f"the picture's URL leads to more than {_MAX_REDIRECTS} redirects")

    async def _answer(self, url: str) -> bytes | str:
        """The body, or the address that it redirects to."""
        import httpx

        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        if parts.scheme not in ("http", "https") or host not in self.hosts:
            raise _RefusalError(
                f"pictures are not fetched from {host[:200]!r}; the operator allows hosts by --allowed-media-domains. "
                "Send the picture as a data URL"
            )
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = self._address(host, await asyncio.to_thread(self.resolve, host, port))
        target = httpx.URL(url).copy_with(host=address, userinfo=b"", fragment=None)
        headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Accept": "image/*",
            "Accept-Encoding": "identity",
        }
        async with (
            # Reading the certificates takes tens of milliseconds.
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=parts.scheme == "https") as client,
            client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as response,
        ):
            if response.has_redirect_location:
                return str(response.headers["location"])
            if response.status_code != HTTPStatus.OK:
                raise _RefusalError(f"the picture's server answered with status {response.status_code}")
            data = bytearray()
            async for piece in response.aiter_raw(64 * 1024):
                data += piece
                if len(data) > MAX_BYTES:
                    break
            return _bounded(data)

    def _address(self, host: str, found: Sequence[str]) -> str:
        """The address to connect to: a public one, unless the operator named this machine or the address itself."""
        is_named = host in _LOCAL_NAMES or _is_address(host)
        usable = [each for each in found if is_named or _is_public(each)]
        if not usable:
            raise _RefusalError(f"the host {host[:200]!r} has no public address")
        return usable[0]


class _RefusalError(Exception):
    """Why a picture is not read."""


def _is_public(address: str) -> bool:
    number = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address):
        if number in _NAT64:
            return False
        number = number.ipv4_mapped or number
    return number.is_global and not number.is_multicast


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _decoded(text: str) -> bytes:
    text = "".join(text.split())
    is_for_urls = "-" in text or "_" in text
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_" if is_for_urls else None, validate=True)
    except (binascii.Error, ValueError):
        raise _RefusalError(
            "a picture was expected as a data URL, base64 or an http(s) URL; the text is none of them"
        ) from None
    return _bounded(data)


def _bounded(data: bytes | bytearray) -> bytes:
    if len(data) > MAX_BYTES:
        raise _too_large()
    if not data:
        raise _RefusalError("the picture is empty")
    return bytes(data)


def _too_large() -> _RefusalError:
    return _RefusalError(f"the picture has more than {MAX_BYTES:,} bytes; send a smaller one")
