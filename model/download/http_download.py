"""Resumable download of one file over HTTP."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from .checksums import Checksum
from .local_files import DownloadError, PartialFile, RemoteVersion, check_free_space, exclusive_lock
from .progress import ByteProgress, no_progress
from .urls import without_credentials

logger = logging.getLogger(__name__)

# A failed attempt that received this many bytes or more resets the number of retries.
_MIN_ATTEMPT_BYTES = 1 << 20
# Longest pause before a retry, in seconds.
_MAX_PAUSE = 60.0
# HTTP status codes after which a retry may succeed.
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Timeouts and retries of a download."""

    # Maximum number of consecutive retries. A failed attempt that received 1 MiB or more resets the
    # count.
    retries: int = 5
    # Seconds before the first retry. The pause doubles before each further retry.
    pause: float = 1.0
    # If no data arrive for this many seconds, the attempt fails.
    timeout: float = 30.0
    # If fewer bytes per second arrive over `timeout` seconds, the attempt fails.
    min_speed: float = 1024.0


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Advice to the user in the error messages of a download."""

    # Remedy if the server does not respond or lacks the file, as in `use a mirror (--mirror)`.
    other_source: str
    # Remedy if the user trusts a file whose checksum is not the expected one, as in `pass its
    # checksum with --checksums`.
    trust: str


class _AttemptError(Exception):
    """A download attempt failed for a reason that may be temporary, so a retry is useful."""


_TRANSIENT = (httpx.TransportError, _AttemptError)


def download_file(
    url: str,
    path: Path,
    *,
    checksum: Checksum | None,
    remedies: Remedies,
    size: int | None = None,
    policy: RetryPolicy = RetryPolicy(),
    wait: bool = False,
    on_progress: ByteProgress = no_progress,
) -> None:
    """Download a file. If `path` exists already, only compare its checksum with the expected one.

    The content is written to a partial file, `path` with the suffix `.partial` added. The partial
    file is renamed to `path` if its checksum is correct. After a failure, the next call resumes the
    partial file if the server supports range requests and the remote file has not changed.

    Args:
        url: HTTP or HTTPS URL.
        path: File to create in an existing folder.
        checksum: Expected checksum. None: do not check the content.
        remedies: Advice to the user in the error messages.
        size: Expected size in bytes, which must equal the size that the server states. None: do not
            compare the size.
        policy: Timeouts and retries.
        wait: Whether to wait while another process downloads the file. False: raise an error.
        on_progress: Called repeatedly with a step such as `downloading val2017.zip`, the bytes
            done, and the bytes in total (None: unknown).

    Raises:
        DownloadError: The download failed, the file has another size or checksum, or another
            process downloads the file and `wait` is False.
    """

    def mismatch(file: Path) -> str | None:
        """Describe a file's wrong checksum. Return None if it is right or if `checksum` is None."""
        if checksum is None:
            return None
        actual = checksum.of(file, f"checking {path.name}", on_progress)
        return None if actual == checksum else f"its {actual} is not {checksum.digest}"

    # A complete file needs no lock. In a read-only folder, the lock could not be written.
    with nullcontext() if path.exists() else exclusive_lock(path, wait=wait):
        if path.exists():
            if actual := mismatch(path):
                raise DownloadError(
                    f"{path} exists but is not the published file: {actual}; delete it to download "
                    f"it again, or, to trust this file, {remedies.trust}"
                )
            return
        partial = PartialFile(path)
        download = _Download(url, partial, size, policy, remedies, on_progress)
        download.run()
        if actual := mismatch(partial.path):
            partial.remove()
            raise DownloadError(
                f"{download.name} is not the published file: {actual}; the downloaded copy was "
                f"deleted. Try again, or {remedies.other_source}; to trust this file, "
                f"{remedies.trust}"
            )
        partial.publish(path)


@dataclass(frozen=True)
class _Download:
    """Download of the missing bytes of a partial file, with retries."""

    url: str
    partial: PartialFile
    size: int | None
    policy: RetryPolicy
    remedies: Remedies
    on_progress: ByteProgress

    @property
    def name(self) -> str:
        """URL without user name and password, for messages."""
        return without_credentials(self.url)

    def run(self) -> None:
        """Download the missing bytes, with retries, until the file is complete.

        Raises:
            DownloadError: no retries are left, or the error is permanent, such as a full disk.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(_TRANSIENT)
            & retry_if_not_exception_type(httpx.UnsupportedProtocol),
            stop=stop_after_attempt(1 + self.policy.retries),
            wait=wait_exponential(self.policy.pause, max=_MAX_PAUSE),
            before_sleep=self._log_retry,
            reraise=True,
        )
        try:
            with self._client() as client:
                while not retrying(self._advance, client):
                    time.sleep(self.policy.pause)
        except httpx.UnsupportedProtocol as error:  # the URL, or a redirect's target, lacks a host
            raise DownloadError(
                f"{self.name}: {_reason(error).rstrip('.')}; correct the URL, or "
                f"{self.remedies.other_source}"
            ) from error
        # UnicodeError: the name of the host has an empty or too long label, as in `a..b`.
        except (*_TRANSIENT, httpx.TooManyRedirects, httpx.InvalidURL, UnicodeError) as error:
            raise DownloadError(f"{self.name}: {_reason(error)}; {self._remedy()}") from error
        except OSError as error:
            raise DownloadError(
                f"cannot write {self.partial.path}: {error.strerror}; {self._remedy()}"
            ) from error

    def _client(self) -> httpx.Client:
        """Return an HTTP client that follows redirects.

        Raises:
            DownloadError: An environment variable names an unsupported proxy, or a file of
                certificates that cannot be read.
        """
        try:
            # httpx reads environment variables such as HTTPS_PROXY and SSL_CERT_FILE.
            return httpx.Client(follow_redirects=True, timeout=self.policy.timeout)
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise DownloadError(
                f"cannot request {self.name}: {str(error).rstrip('.')}; correct the environment "
                "variable HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE"
            ) from error

    def _log_retry(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        error, pause = state.outcome.exception(), state.next_action.sleep
        assert error is not None
        logger.warning("%s: %s; trying again in %.0f s", self.name, _reason(error), pause)

    def _remedy(self) -> str:
        size = self.partial.size
        if not size:
            return f"no data were received; try again, or {self.remedies.other_source}"
        return f"{size} bytes are kept; run the same command again to resume"

    def _advance(self, client: httpx.Client) -> bool:
        """Make one download attempt. Return whether the file is complete.

        If the attempt fails after it has received `_MIN_ATTEMPT_BYTES` or more, return False, so
        that the caller counts retries from 0 again. If it fails earlier, raise its error.
        """
        before, version = self.partial.size, self.partial.version
        if before and before == version.total:
            return True
        try:
            self._attempt(client, before, version)
        except _TRANSIENT:
            if self.partial.size - before < _MIN_ATTEMPT_BYTES:
                raise
            return False
        return True

    def _attempt(self, client: httpx.Client, start: int, version: RemoteVersion) -> None:
        headers = {"Accept-Encoding": "identity"}
        if start and version != RemoteVersion():
            headers["Range"] = f"bytes={start}-"
            if version.validator is not None:
                headers["If-Range"] = version.validator
        with client.stream("GET", self.url, headers=headers) as response:
            self._check_status(response)
            sent, first = _version_of(response), _first_byte(response)
            if first == 0:
                self._restart(start, version, sent)
            elif first != start or not version.agrees_with(sent):
                self.partial.remove()
                raise _AttemptError(
                    "the server sent a byte range that was not requested, or another version of "
                    "the file"
                )
            total = sent.total
            if total is not None:
                check_free_space(self.partial.path, total - self.partial.size)
            step = f"downloading {self.partial.path.stem}"
            with self.partial.path.open("ab") as file:
                for chunk in _with_min_speed(response.iter_raw(), self.policy):
                    file.write(chunk)
                    self.on_progress(step, file.tell(), total)
        if total is not None and self.partial.size != total:
            raise _AttemptError(f"the server sent only {self.partial.size} of {total} bytes")

    def _check_status(self, response: httpx.Response) -> None:
        status = f"{response.status_code} {response.reason_phrase}".strip()
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            self.partial.remove()
            raise _AttemptError("the file on the server is shorter than the partial download")
        if response.status_code in _RETRYABLE:
            raise _AttemptError(f"the server answered {status}")
        if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise DownloadError(
                f"{self.name}: the server answered {status}; check the address, or "
                f"{self.remedies.other_source}"
            )

    def _restart(self, start: int, version: RemoteVersion, sent: RemoteVersion) -> None:
        """Empty the partial file, to receive the remote file from its first byte.

        Record the version `sent`. If downloaded bytes are discarded, log a warning with the reason.

        Args:
            start: Number of bytes in the partial file so far.
            version: Recorded version of the remote file, from which these bytes were downloaded.
            sent: Version of the remote file in the server's latest response.

        Raises:
            DownloadError: The file on the server does not have the expected size.
        """
        if self.size is not None and sent.total not in (None, self.size):
            raise DownloadError(
                f"{self.name} sends {sent.total} bytes, but the published file has {self.size} "
                f"bytes; {self.remedies.other_source}; to trust this file, {self.remedies.trust}"
            )
        if start:
            same = version != RemoteVersion() and version.agrees_with(sent)
            reason = "cannot resume downloads" if same else "now has another version of the file"
            logger.warning("%s: restarting the download, because the server %s", self.name, reason)
        self.partial.restart(sent)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _version_of(response: httpx.Response) -> RemoteVersion:
    etag = response.headers.get("ETag")
    # Drop weak entity tags, which HTTP forbids in If-Range: they do not guarantee equal bytes.
    strong = etag if etag is not None and not etag.startswith("W/") else None
    if response.status_code == httpx.codes.PARTIAL_CONTENT:
        length = response.headers.get("Content-Range", "").rpartition("/")[2]
    else:
        length = response.headers.get("Content-Length", "")
    return RemoteVersion(
        etag=strong,
        last_modified=response.headers.get("Last-Modified"),
        total=int(length) if length.isdecimal() else None,
    )


def _first_byte(response: httpx.Response) -> int:
    """Return the position of a response's first byte in the remote file.

    Raises:
        _AttemptError: The response is partial, but its header Content-Range is missing or invalid.
    """
    if response.status_code != httpx.codes.PARTIAL_CONTENT:
        return 0
    unit, _, rest = response.headers.get("Content-Range", "").partition(" ")
    first = rest.partition("-")[0]
    if unit != "bytes" or not first.isdecimal():
        raise _AttemptError("the server sent a part of the file without a valid Content-Range")
    return int(first)


def _with_min_speed(chunks: Iterable[bytes], policy: RetryPolicy) -> Iterator[bytes]:
    """Yield the given chunks of a response.

    If fewer than `policy.min_speed` bytes/s arrive on average during `policy.timeout` seconds,
    raise _AttemptError.
    """
    since, received = time.monotonic(), 0
    for chunk in chunks:
        yield chunk
        received += len(chunk)
        seconds = time.monotonic() - since
        if seconds >= policy.timeout:
            if received < policy.min_speed * seconds:
                raise _AttemptError(
                    f"the server is too slow: it sent only {received} bytes in {seconds:.0f} s"
                )
            since, received = time.monotonic(), 0
