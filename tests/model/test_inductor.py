import pytest
import torch
from torch._inductor.exc import OperatorIssue

from maskrcnn_trt.model.inductor import configure_inductor


class Input:
    """Input of an operation whose text must not be formatted."""

    def __str__(self) -> str:
        raise AssertionError


@pytest.mark.skipif(torch.__version__ >= "2.13", reason="torch formats only logged messages")
def test_messages_about_operations_do_not_contain_their_inputs() -> None:
    configure_inductor()
    text = OperatorIssue.operator_str("nms_keep", [Input()], {"scores": Input()})
    assert "nms_keep" in text
