"""`python -m maskrcnn_trt` is `maskrcnn`, for launchers such as torchrun that take a module."""

from .cli import main

main()
