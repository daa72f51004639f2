"""HTTP server with configurable faults."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Fault:
    """Fault that the server injects into a response. By default, there is none."""

    # Respond with this status and without the file.
    status: int | None = None
    # Close the connection after this number of body bytes.
    cut_after: int | None = None
    # Stop after this number of body bytes, and keep the connection open.
    silent_after: int | None = None
    # Send one byte every few milliseconds.
    trickle: bool = False
    # Claim this file size, in bytes, in the headers. None: the true size.
    announced: int | None = None


@dataclass
class Site:
    """Files, configured faults and recorded requests of a server."""

    files: dict[str, bytes]
    # Faults of the next responses, in order.
    faults: list[Fault] = field(default_factory=list)
    # Fault of all responses after these.
    always: Fault = field(default_factory=Fault)
    # Support the header Range.
    ranges: bool = True
    # Send ETag and support If-Range.
    validators: bool = True
    # Send Content-Length.
    lengths: bool = True
    url: str = ""
    # The header Range of each request.
    requested_ranges: list[str | None] = field(default_factory=list)
    bytes_sent: int = 0
    # Set when a response has reached `silent_after`.
    half_sent: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve a site on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _respond(self, site)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        site.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield site
        finally:
            site.closing.set()
            server.shutdown()
            thread.join()


def _respond(handler: BaseHTTPRequestHandler, site: Site) -> None:
    requested = handler.headers.get("Range")
    site.requested_ranges.append(requested)
    fault = site.faults.pop(0) if site.faults else site.always
    content = site.files.get(handler.path.removeprefix("/"))
    if fault.status is not None or content is None:
        handler.send_error(fault.status or 404)
        return
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    start = int(re.fullmatch(r"bytes=(\d+)-", requested)[1]) if requested and site.ranges else 0
    if site.validators and handler.headers.get("If-Range", etag) != etag:
        start = 0
    total = fault.announced or len(content)
    if start >= total > 0:
        handler.send_error(416)
        return
    handler.send_response(206 if start else 200)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
    if site.lengths:
        handler.send_header("Content-Length", str(total - start))
    if site.validators:
        handler.send_header("ETag", etag)
    handler.end_headers()
    _send(handler, site, fault, content[start:])


def _send(handler: BaseHTTPRequestHandler, site: Site, fault: Fault, body: bytes) -> None:
    end = next(n for n in (fault.cut_after, fault.silent_after, len(body)) if n is not None)
    step = 1 if fault.trickle else 4096
    for first in range(0, min(end, len(body)), step):
        piece = body[first : min(first + step, end)]
        # Count the bytes before sending them, because the client may receive them and check the
        # count before this thread continues.
        site.bytes_sent += len(piece)
        try:
            handler.wfile.write(piece)
        except OSError:  # the client has closed the connection
            return
        if fault.trickle and site.closing.wait(0.01):
            return
    if fault.silent_after is not None:
        site.half_sent.set()
        site.closing.wait()
