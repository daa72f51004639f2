"""Configuration of Inductor, torch's compiler, for training and for exported programs."""

from typing import Any

import torch

# Options for `torch.compile`. By default, Inductor pads the strides of large intermediate tensors.
# torch 2.11 then computes wrong results on a GPU: it may write a tensor with one layout and read it
# with another, beyond the tensor's end (https://github.com/pytorch/pytorch/issues/194281).
_OPTIONS: dict[str, Any] = {"comprehensive_padding": False}


def configure_inductor() -> dict[str, Any]:
    """Configure Inductor in this process, and return the options for `torch.compile`."""
    if torch.__version__ < "2.13":
        from torch._inductor.exc import OperatorIssue  # needed only to compile

        # When Inductor first compiles a custom operation, it formats a message with the operation's
        # inputs, even if nothing logs this message. The text of an input contains the texts of its
        # own inputs. A residual block uses its input twice, so the text doubles with each block.
        # For an R-101, the compilation would not end. torch 2.13 formats only messages that are
        # logged. Without the inputs, the messages of some compilation errors are shorter, too.
        OperatorIssue.operator_str = staticmethod(_operator_text)  # type: ignore[method-assign]
    return dict(_OPTIONS)


def _operator_text(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"
