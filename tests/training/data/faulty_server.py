"""A real HTTP server that fails as asked."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Fault:
    """What goes wrong with an answer."""

    status: int | None = None
    """Answer with this alone."""
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    silent_after: int | None = None
    """Send no more after so many bytes of the body, and leave the connection open."""
    trickle: bool = False
    """Send a byte every few milliseconds."""
    announced: int | None = None
    """Say that the file has so many bytes."""


@dataclass
class Site:
    """What the server has, what fails next, and what it was asked for."""

    files: dict[str, bytes]
    faults: list[Fault] = field(default_factory=list)
    """One for each of the next answers, in turn."""
    always: Fault = field(default_factory=Fault)
    """For all later answers."""
    ranges: bool = True
    validators: bool = True
    """Tell the version of a file, and heed If-Range."""
    lengths: bool = True
    """Tell the length of a file."""
    url: str = ""
    ranges_asked: list[str | None] = field(default_factory=list)
    """The Range of each request."""
    bytes_sent: int = 0
    half_sent: threading.Event = field(default_factory=threading.Event)
    """An answer has got to where it falls silent."""
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve a site on a free port for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, site)

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


def _answer(handler: BaseHTTPRequestHandler, site: Site) -> None:
    asked = handler.headers.get("Range")
    site.ranges_asked.append(asked)
    fault = site.faults.pop(0) if site.faults else site.always
    content = site.files.get(handler.path.removeprefix("/"))
    if fault.status is not None or content is None:
        handler.send_error(fault.status or 404)
        return
    etag = f'"{hashlib.sha1(content).hexdigest()}"'
    start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and site.ranges else 0
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
        try:
            handler.wfile.write(piece)
        except OSError:  # the client has gone
            return
        site.bytes_sent += len(piece)
        if fault.trickle and site.closing.wait(0.01):
            return
    if fault.silent_after is not None:
        site.half_sent.set()
        site.closing.wait()
