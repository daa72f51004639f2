"""A name server whose one name has the addresses that a test gives it."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

_HEADER = 12
_IPV4 = 1


@contextlib.contextmanager
def named(addresses: Sequence[str]) -> Iterator[str]:
    """The address of a server of names, for which every name has these addresses of IPv4.

    Args:
        addresses: Looked up anew for each question.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as questions:
        questions.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=_answer_all, args=(questions, addresses))
        thread.start()
        place = questions.getsockname()
        try:
            yield "{}:{}".format(*place)
        finally:
            questions.sendto(b"", place)
            thread.join()


def _answer_all(questions: socket.socket, addresses: Sequence[str]) -> None:
    while True:
        question, asker = questions.recvfrom(512)
        if not question:
            return
        questions.sendto(_answer(question, addresses), asker)


def _answer(question: bytes, addresses: Sequence[str]) -> bytes:
    end = question.index(b"\0", _HEADER) + 5
    (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
    records = [
        b"\xc0\x0c" + struct.pack("!2HIH", _IPV4, 1, 0, 4) + socket.inet_aton(address)
        for address in (addresses if kind == _IPV4 else ())
    ]
    counts = struct.pack("!4H", 1, len(records), 0, 0)
    return question[:2] + b"\x84\0" + counts + question[_HEADER:end] + b"".join(records)
