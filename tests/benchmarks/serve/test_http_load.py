"""HTTP load on a server: detections, rejections and lost connections."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from maskrcnn_trt.benchmarks.serve.load import ClientLoad, HttpLoop, LoadWindow, send_load

TIMING = {"decode_us": 1, "queue_us": 2, "infer_us": 3, "encode_us": 4, "batch_size": 5}


class Handler(BaseHTTPRequestHandler):
    """Detects in every third request, rejects the next, and disconnects the third."""

    protocol_version = "HTTP/1.1"
    bodies: list[tuple[str, bytes]] = []  # noqa: RUF012 (the tests read it)

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.bodies.append((self.path, self.rfile.read(size)))
        kind = (len(self.bodies) - 1) % 3
        if kind == 2:
            self.connection.close()
            self.close_connection = True
            return
        body = json.dumps({"timing": TIMING}).encode()
        self.send_response(200 if kind == 0 else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield "{}:{}".format(*server.server_address)
        server.shutdown()


def test_outcomes_of_requests_over_http(address: str) -> None:
    now = time.monotonic()
    load = ClientLoad(
        address=address,
        load=HttpLoop(1, path="/v1/detect?mask_format=none"),
        index=0,
        count=1,
        requests=[b"first", b"second"],
        window=LoadWindow(now, now, now + 1),
        timeout_s=5,
        seed=0,
    )
    logs = send_load(load).requests
    assert [log.status for log in logs[:4]] == ["OK", "HTTP 503", "UNAVAILABLE", "OK"]
    assert logs[0].timing == (1, 2, 3, 4, 5)
    assert Handler.bodies[:2] == [
        ("/v1/detect?mask_format=none", b"first"),
        ("/v1/detect?mask_format=none", b"second"),
    ]
