"""How a request body is sent: compressed, framed in two ways, or left unfinished."""

from __future__ import annotations

import functools
import gzip
import json
import zlib

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, connect, receive_until, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.server.http.content_encoding import BodyDecoder
from twofold.server.http.errors import ApiError

TEXT = "/v1/completions"
compressed = functools.partial(gzip.compress, mtime=0)  # the same bytes in every process of a run
BODY = json.dumps({"prompt": "a b c"}).encode()
TWO_MEMBERS = compressed(BODY[:7]) + compressed(BODY[7:])
BARE_DEFLATE = zlib.compress(BODY)[2:-4]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def engine():
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def url(engine):
    with serving(create_app(engine, ServerConfig(max_body_bytes=2048))) as url:
        yield url


@pytest.mark.parametrize(
    ("coding", "sent", "status", "words"),
    [
        ("gzip", compressed(BODY), 200, ""),
        ("X-GZIP", compressed(BODY), 200, ""),
        ("gzip", TWO_MEMBERS, 200, ""),
        ("deflate", zlib.compress(BODY), 200, ""),
        ("deflate", BARE_DEFLATE, 200, ""),
        ("identity", BODY, 200, ""),
        ("", BODY, 200, ""),
        ("br", BODY, 415, "'br'"),
        ("gzip, gzip", compressed(compressed(BODY)), 415, "'gzip, gzip'"),
        ("gzip", BODY, 400, "not valid gzip"),
        ("gzip", compressed(BODY)[:-9], 400, "ends too early"),
        ("deflate", zlib.compress(BODY) + b"x", 400, "not valid deflate"),
        ("deflate", b"x", 400, "ends too early"),
        ("gzip", compressed(BODY + b" " * 4096), 413, "2048 bytes"),
        ("gzip", compressed(bytes(1 << 26)), 413, "2048 bytes"),
    ],
)
def test_a_compressed_body_is_read_or_refused_by_its_coding(url, coding, sent, status, words):
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = HTTP.post(url + TEXT, content=sent, headers=headers)
    assert response.status_code == status, response.text
    assert words in response.text


@pytest.mark.parametrize(
    ("coding", "sent"), [("gzip", TWO_MEMBERS), ("deflate", zlib.compress(BODY)), ("deflate", BARE_DEFLATE)]
)
def test_a_compressed_body_arrives_byte_by_byte(coding, sent):
    decoder = BodyDecoder(coding)
    decoded = b"".join(piece for byte in sent for piece in decoder.pieces(bytes([byte])))
    decoder.end()
    assert decoded == BODY


def test_a_decoder_expands_in_bounded_pieces():
    pieces = BodyDecoder("gzip").pieces(compressed(bytes(1 << 24)))
    assert max(len(piece) for piece in pieces) <= 1 << 18


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 19) + 1])
def test_a_body_of_several_pieces_is_decoded_whole(size):
    body = b"ab" * size
    for coding, sent in (("gzip", compressed(body)), ("deflate", zlib.compress(body)[2:-4])):
        decoder = BodyDecoder(coding)
        assert b"".join(decoder.pieces(sent)) == body
        decoder.end()


def test_an_unknown_coding_lists_the_known_ones():
    with pytest.raises(ApiError) as caught:
        BodyDecoder("zstd")
    assert caught.value.headers["Accept-Encoding"] == "gzip, deflate, identity"


def test_a_body_framed_in_two_ways_is_refused_and_the_connection_closed(url, engine):
    with connect(url) as connection:
        framing = f"Content-Length: {len(BODY)}\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall((HEAD + framing).encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"\r\n\r\n") == 1
    assert engine.requests == []


@pytest.mark.parametrize(
    "begun",
    [b"Content-Length: 99\r\n\r\n" + BODY, b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b" % (len(BODY), BODY)],
    ids=["counted", "chunked"],
)
def test_a_client_that_disconnects_during_its_body_is_no_server_error(url, caplog, begun):
    with connect(url) as connection:
        connection.sendall(HEAD.encode() + begun)
    with connect(url) as connection:  # answered after the first connection's end has been handled
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        receive_until(connection, b"HTTP/1.1 200")
    metrics = HTTP.get(f"{url}/metrics").text
    assert 'status="5xx"' not in metrics
    assert caplog.records == []
