"""Run the `maskrcnn` command as `python -m maskrcnn_trt`, as launchers such as torchrun do."""

from .cli import main

main()
