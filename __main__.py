"""Entry point of `python -m maskrcnn_trt`, for launchers such as torchrun.

It runs the `maskrcnn` command.
"""

from .cli import main

main()
