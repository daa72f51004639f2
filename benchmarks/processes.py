"""Work in a process of its own, which leaves no memory and no settings behind."""

from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ProcessError(Exception):
    """A process ended before its work was done."""


def answers_from_process(
    function: Callable[_P, Iterable[_T]], *args: _P.args, **kwargs: _P.kwargs
) -> Iterator[_T]:
    """What a function yields in a fresh process, each answer when it comes.

    Args:
        function: Of a module; it, its arguments and its answers are pickled.
        args: Passed on to it.
        kwargs: Passed on to it.

    Raises:
        ProcessError: the process died, or the function raised, which it printed.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_answers, args=(sender, function, args, kwargs))
    process.start()
    sender.close()
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        process.join()
    finally:
        receiver.close()
        process.terminate()
        process.join()
    if process.exitcode:
        raise ProcessError(f"its process ended with exit code {process.exitcode}")


def _send_answers(
    sender: Connection, function: Callable[..., Iterable[Any]], args: Any, kwargs: Any
) -> None:
    for answer in function(*args, **kwargs):
        sender.send(answer)
