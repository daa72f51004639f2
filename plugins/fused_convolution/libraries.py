"""Direct calls of NVIDIA libraries through ctypes, for functions that torch does not offer.

The libraries are those that torch has loaded.
"""

import ctypes
from typing import Any


class UnsupportedError(Exception):
    """A library is missing, or does not support a call."""


class Library:
    """Shared library such as cuDNN. Its methods check the status that library functions return."""

    def __init__(self, name: str) -> None:
        """Open the shared library `name`.

        Raises:
            UnsupportedError: there is no such library.
        """
        try:
            self._functions = ctypes.CDLL(name)
        except OSError as error:
            raise UnsupportedError(str(error)) from error

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function and check its status.

        Arguments are ctypes values, or Python integers, which are passed as C's `int`.

        Raises:
            UnsupportedError: the library lacks the function, or the status is not 0.
        """
        try:
            status = getattr(self._functions, function)(*arguments)
        except AttributeError as error:
            raise UnsupportedError(str(error)) from error
        if status != 0:
            raise UnsupportedError(f"the library call {function} failed with status {status}")

    def create(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function that creates an object, and return the object's handle.

        The function must store the handle at the address in its first argument. `arguments` are the
        function's arguments after the first.
        """
        handle = ctypes.c_void_p()
        self.call(function, ctypes.byref(handle), *arguments)
        return handle
