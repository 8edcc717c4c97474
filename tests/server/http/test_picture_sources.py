"""Pictures that requests name by URL: no host is asked that the operator did not allow, nothing is endless."""

from __future__ import annotations

import base64
import ipaddress
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from twofold.api.config import ServerConfig
from twofold.api.errors import RequestError
from twofold.server.http import picture_sources
from twofold.server.http.picture_sources import PictureSources

BODY: Final = b"a picture"
PRIVATE: Final = (
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "10.255.1.2", "172.16.0.1", "172.31.9.9", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "192.0.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1",
    "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "2001:db8::1",
)  # fmt: skip


class Hostile(BaseHTTPRequestHandler):
    """A server that answers as the path says."""

    asked: Final[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, _, rest = self.path.lstrip("/").partition("/")
        try:
            getattr(self, f"_{kind}")(rest)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass

    def _good(self, _: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def _status(self, rest: str) -> None:
        self.send_response(int(rest))
        self.send_header("content-length", "0")
        self.end_headers()

    def _to(self, rest: str) -> None:
        self.send_response(302)
        self.send_header("location", bytes.fromhex(rest).decode())
        self.send_header("content-length", "0")
        self.end_headers()

    def _loop(self, rest: str) -> None:
        self._to(f"/loop/{rest}x".encode().hex())

    def _endless(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(bytes(1 << 16))

    def _slow(self, _: str) -> None:
        self.send_response(200)
        self.end_headers()
        while True:
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.02)

    def _header(self, _: str) -> None:
        while True:  # a header that never ends
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.02)

    def _silent(self, _: str) -> None:
        self.rfile.read(1)

    def _empty(self, _: str) -> None:
        self._status("200")

    def _cut(self, _: str) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(b"x")
        self.close_connection = True

    def _bomb(self, _: str) -> None:
        self.send_response(200)
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", "4")
        self.end_headers()
        self.wfile.write(b"\x1f\x8b\x00\x00")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_sources, "MAX_BYTES", 1 << 20)


LOCAL: Final = PictureSources.of(ServerConfig(allowed_media_domains=("127.0.0.1, Allowed.test",)))


def refusal(sources: PictureSources, url: str) -> str:
    with pytest.raises(RequestError) as raised:
        sources.read(url, "messages[0].content")
    assert raised.value.param == "messages[0].content"
    return str(raised.value)


def resolving(*addresses: str) -> tuple[PictureSources, list[str]]:
    """Sources with a name server that gives these answers in turn."""
    answers, asked = itertools.cycle(addresses), []

    def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return [next(answers)]

    return replace(LOCAL, resolve=resolve), asked


def test_an_allowed_host_is_asked(port: int) -> None:
    assert LOCAL.read(f"http://127.0.0.1:{port}/good", "x") == BODY
    relative = f"http://127.0.0.1:{port}/to/{b'/good'.hex()}"
    assert LOCAL.read(relative, "x") == BODY


@pytest.mark.parametrize("address", PRIVATE)
def test_a_name_of_a_private_address_is_not_asked(port: int, address: str) -> None:
    sources, asked = resolving(address)
    assert "no public address" in refusal(sources, f"http://allowed.test:{port}/good")
    assert asked == ["allowed.test"]


@pytest.mark.parametrize("address", PRIVATE)
def test_redirects_to_other_hosts_are_not_followed(port: int, address: str) -> None:
    literal = f"[{address}]" if ":" in address else address
    before = len(Hostile.asked)
    for target in (f"http://{literal}:{port}/good", f"https://{literal}/", f"//{literal}:{port}/good"):
        if address == "127.0.0.1" and not target.startswith("https"):
            continue  # the operator allowed it
        refusal(LOCAL, f"http://127.0.0.1:{port}/to/{target.encode().hex()}")
    assert "/good" not in Hostile.asked[before:]


def test_the_address_is_resolved_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes between the check and the connection: the connection goes to what was checked."""
    sources, asked = resolving("93.184.216.34", "127.0.0.1")
    connected: list[Any] = []

    async def connect(self: Any, factory: Any, host: Any = None, *rest: Any, **further: Any) -> Any:
        connected.append(host)
        raise OSError("not reached in tests")

    import asyncio

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    refusal(sources, f"http://allowed.test:{port}/good")
    assert asked == ["allowed.test"]
    assert {str(ipaddress.ip_address(host)) for host in connected} == {"93.184.216.34"}


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("endless", "more than 1,048,576 bytes"),
        ("loop/", "redirects"),
        ("status/404", "status 404"),
        ("status/500", "status 500"),
        ("status/204", "status 204"),
        ("empty", "empty"),
        ("cut", "cannot be fetched"),
        (f"to/{b'ftp://127.0.0.1/'.hex()}", "not fetched"),
        (f"to/{b'file:///etc/passwd'.hex()}", "not fetched"),
    ],
)
def test_hostile_servers_end(port: int, bounded: None, path: str, why: str) -> None:
    assert why in refusal(LOCAL, f"http://127.0.0.1:{port}/{path}")


@pytest.mark.parametrize("path", ["slow", "header", "silent"])
def test_slow_servers_end(port: int, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(picture_sources, "_TIMEOUT_S", 0.4)
    assert "did not arrive" in refusal(LOCAL, f"http://127.0.0.1:{port}/{path}")


def test_a_body_is_not_decompressed(port: int) -> None:
    assert LOCAL.read(f"http://127.0.0.1:{port}/bomb", "x") == b"\x1f\x8b\x00\x00"


def hostile_urls() -> list[str]:
    """Ways to write an address that a careless check takes for an allowed host."""
    hosts = [
        "127.0.0.1.nip.io", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.1%2f@example.test", "localhost",
        "allowed.test.example.org", "xallowed.test", "allowed.test@example.org", "example.org#allowed.test",
        "example.org?allowed.test", "example.org\\allowed.test", "ａllowed.test", "allowed。test", "allowed.test.",
        "127.0.0.1@example.org", "[::1]", "[::ffff:127.0.0.1]", "[::]", "0", "", "%61llowed.test", " allowed.test",
        "allowed.test\t.example.org", "user:pass@127.0.0.2", "127.0.0.2", "allowed.test:x", "allowed.test:99999",
    ]  # fmt: skip
    schemes = ("http://", "https://", "HTTP://", "http:/", "http:///", "http:", "http://\\")
    return [f"{scheme}{host}/a.png" for scheme in schemes for host in hosts]


def test_no_spelling_reaches_another_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def resolve(host: str, port: int) -> Sequence[str]:
        asked.add(host)
        raise socket.gaierror("no names in tests")

    sources = replace(LOCAL, resolve=resolve)
    urls = hostile_urls()
    assert len(urls) >= 200
    for url in urls:
        refusal(sources, url)
    assert asked <= {"127.0.0.1", "allowed.test"}


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "file:///../etc/passwd", "file://localhost/etc/passwd", "file://other/a.png"),
        *("file:///%00", "file:a", "file:///{}/../secret.png", "file:///{}/link.png", "file:///{}"),
        *("file:///{}/pipe", "file:///{}/missing.png"),
    ],
)
def test_files_outside_the_directory_are_not_read(tmp_path: Path, url: str) -> None:
    import os

    folder = tmp_path / "pictures"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(folder / "pipe")
    sources = PictureSources.of(ServerConfig(allowed_local_media_path=str(folder)))
    refusal(sources, url.format(str(folder).lstrip("/")))
    (folder / "a b.png").write_bytes(BODY)
    assert sources.read((folder / "a b.png").as_uri(), "x") == BODY


def test_base64_is_read_in_every_spelling() -> None:
    data = bytes(range(250, 256)) * 3 + b"ab"
    plain = base64.b64encode(data).decode()
    in_lines = f"{plain[:5]}\r\n{plain[5:]}\n"
    for text in (
        plain,
        plain.rstrip("="),
        base64.urlsafe_b64encode(data).decode(),
        in_lines,
        f"data:;base64,{plain}",
    ):
        assert LOCAL.read(text, "x") == data
    for text in ("", "data:", "data:image/png;base64,", "data:image/png,abc", "Zé==", "a" * 5, "Z=g="):
        refusal(LOCAL, text)
