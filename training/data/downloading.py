"""One file over HTTP: resumed where it broke off, and under its name only when it is whole."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from .coco import DataError
from .disk import ByteProgress, exclusive, md5_of, no_progress, require_room
from .partial_file import Origin, PartialFile

logger = logging.getLogger(__name__)

_WORTHWHILE = 1 << 20
_MAX_PAUSE = 60.0
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When a server is given up."""

    retries: int = 5
    """Further attempts, each of which brings less than a mebibyte."""
    pause: float = 1.0
    """Seconds before the first of them; they double from one to the next."""
    timeout: float = 30.0
    """Seconds of silence that end an attempt."""
    min_speed: float = 1024.0
    """Bytes a second; an attempt ends that is slower for the time of `timeout`."""


class _AttemptError(Exception):
    """An attempt came to nothing, but another one may not."""


_TRANSIENT = (httpx.TransportError, _AttemptError)


def download_file(
    url: str,
    path: Path,
    *,
    md5: str,
    size: int | None = None,
    patience: Patience = Patience(),
    on_progress: ByteProgress = no_progress,
) -> None:
    """Download a file, or only check it where it is already.

    What arrives is kept in `NAME.partial`, from which the next call goes on if the server sends
    ranges and has the same version still. It gets its name when its checksum is right.

    Args:
        url: where it is, over HTTP or HTTPS.
        path: where it goes, into a folder that exists.
        md5: its MD5 in hexadecimal digits.
        size: its bytes, if known: another file is then refused before it is downloaded.
        patience: when to give up.
        on_progress: see `ByteProgress`.

    Raises:
        DataError: in one sentence, why there is no such file under its name.
    """
    with exclusive(path):
        if path.exists():
            _check_present(path, md5, on_progress)
            return
        partial = PartialFile(path)
        _Fetch(url, partial, size, patience, on_progress).run()
        found = md5_of(partial.path, f"checking {path.name}", on_progress)
        if found != md5:
            partial.remove()
            raise DataError(
                f"{url} is not the published file: its MD5 is {found}, not {md5}; nothing was "
                "kept. Try again or elsewhere (--base-url); to trust this one, see --checksums"
            )
        partial.publish(path)


def _check_present(path: Path, md5: str, on_progress: ByteProgress) -> None:
    found = md5_of(path, f"checking {path.name}", on_progress)
    if found != md5:
        raise DataError(
            f"{path} is there but not the published file: its MD5 is {found}, not {md5}; delete "
            "it to download it anew"
        )


@dataclass(frozen=True)
class _Fetch:
    """Bringing a partial file to its full length."""

    url: str
    partial: PartialFile
    size: int | None
    patience: Patience
    on_progress: ByteProgress

    def run(self) -> None:
        """Attempt until the file is whole; only fruitless attempts in a row count as retries."""
        retrying = Retrying(
            retry=retry_if_exception_type(_TRANSIENT),
            stop=stop_after_attempt(1 + self.patience.retries),
            wait=wait_exponential(self.patience.pause, max=_MAX_PAUSE),
            before_sleep=self._announce_retry,
            reraise=True,
        )
        try:
            # Proxies come from the environment, as everywhere.
            with httpx.Client(follow_redirects=True, timeout=self.patience.timeout) as client:
                while not retrying(self._advance, client):
                    time.sleep(self.patience.pause)
        except (*_TRANSIENT, httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise DataError(f"{self.url}: {_reason(error)}; {self._outlook()}") from error
        except OSError as error:
            raise DataError(
                f"cannot write {self.partial.path}: {error.strerror}; {self._outlook()}"
            ) from error

    def _announce_retry(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        assert error is not None
        logger.warning("%s: %s; trying again in %.0f s", self.url, _reason(error), pause)

    def _outlook(self) -> str:
        size = self.partial.size
        if not size:
            return "nothing has arrived; try again, or elsewhere (--base-url)"
        return f"{size} bytes are kept, and the same command goes on from there"

    def _advance(self, client: httpx.Client) -> bool:
        """Whether the file is whole after one attempt, which may break off if it was worth it."""
        before, origin = self.partial.size, self.partial.origin
        if before and before == origin.total:
            return True
        try:
            self._attempt(client, before, origin)
        except _TRANSIENT:
            if self.partial.size - before < _WORTHWHILE:
                raise
            return False
        return True

    def _attempt(self, client: httpx.Client, start: int, origin: Origin) -> None:
        headers = {"Accept-Encoding": "identity"}
        if start and origin != Origin():
            headers["Range"] = f"bytes={start}-"
            if origin.validator is not None:
                headers["If-Range"] = origin.validator
        with client.stream("GET", self.url, headers=headers) as response:
            self._check_status(response)
            sent, first = _origin_of(response), _first_byte(response)
            if first == 0:
                self._restart(start, origin, sent)
            elif first != start or not origin.agrees_with(sent):
                self.partial.remove()
                raise _AttemptError("the server went on with something else")
            total = sent.total
            if total is not None:
                require_room(self.partial.path, total - self.partial.size)
            step = f"downloading {self.partial.path.stem}"
            with self.partial.path.open("ab") as file:
                for chunk in _lively(response.iter_raw(), self.patience):
                    file.write(chunk)
                    self.on_progress(step, file.tell(), total)
        if total is not None and self.partial.size != total:
            raise _AttemptError(f"the server sent {self.partial.size} of {total} bytes")

    def _check_status(self, response: httpx.Response) -> None:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            self.partial.remove()
            raise _AttemptError("the server has less of the file than has arrived")
        if response.status_code in _BUSY:
            raise _AttemptError(f"the server answered {status}")
        if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise DataError(
                f"{self.url}: the server answered {status}; check the address, or name a mirror "
                "with --base-url"
            )

    def _restart(self, start: int, origin: Origin, sent: Origin) -> None:
        """Begin anew with the body that the server sends.

        Raises:
            DataError: it is another file than the one asked for.
        """
        if self.size is not None and sent.total not in (None, self.size):
            raise DataError(
                f"{self.url} has {sent.total} bytes, the published file {self.size}; name a "
                "mirror with --base-url; to trust this one, see --checksums"
            )
        if start:
            same = origin != Origin() and origin.agrees_with(sent)
            reason = "the server cannot resume" if same else "the file there is another now"
            logger.warning("%s: starting anew, for %s", self.url, reason)
        self.partial.restart(sent)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _origin_of(response: httpx.Response) -> Origin:
    """What the headers of an answer say of the whole file."""
    etag = response.headers.get("ETag")
    # A weak tag does not promise equal bytes; HTTP forbids to resume by one.
    strong = etag if etag is not None and not etag.startswith("W/") else None
    if response.status_code == httpx.codes.PARTIAL_CONTENT:
        length = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        length = response.headers.get("Content-Length", "")
    return Origin(
        etag=strong,
        last_modified=response.headers.get("Last-Modified"),
        total=int(length) if length.isdecimal() else None,
    )


def _first_byte(response: httpx.Response) -> int:
    """Place in the file of the first byte of an answer.

    Raises:
        _AttemptError: a part of the file, but it does not say which.
    """
    if response.status_code != httpx.codes.PARTIAL_CONTENT:
        return 0
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    first = rest.partition("-")[0]
    if unit != "bytes" or not first.isdecimal():
        raise _AttemptError("the server sent a part of the file without saying which")
    return int(first)


def _lively(chunks: Iterable[bytes], patience: Patience) -> Iterator[bytes]:
    """Pass chunks on for as long as they come fast enough."""
    since, arrived = time.monotonic(), 0
    for chunk in chunks:
        yield chunk
        arrived += len(chunk)
        seconds = time.monotonic() - since
        if seconds >= patience.timeout:
            if arrived < patience.min_speed * seconds:
                raise _AttemptError(f"the server sent {arrived} bytes in {seconds:.0f} s")
            since, arrived = time.monotonic(), 0
