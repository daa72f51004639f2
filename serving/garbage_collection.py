"""Python's collections of garbage, kept short in the processes of a server."""

import gc


def pass_over_present_objects() -> None:
    """Let collections look at none of the objects that there are now, but at those that come.

    They would find the same modules and models each time. In a process that has imported torch this
    takes a tenth of a second or more, in which no other thread runs.
    """
    gc.collect()
    gc.freeze()
