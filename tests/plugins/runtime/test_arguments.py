import pytest
import torch

from maskrcnn_trt.plugins.runtime.arguments import kernel_argument

SHAPE = (-1, 3, 4)


def test_suitable_tensor_is_not_copied() -> None:
    tensor = torch.rand(2, 3, 4)
    assert kernel_argument("boxes", tensor, torch.float32, SHAPE) is tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 2, 4).transpose(0, 1), torch.rand(2, 4, 3).mT,
     torch.rand(1, 1, 4).expand(2, 3, 4), torch.rand(25)[1:].view(2, 3, 4), torch.rand(0, 3, 4)],
    ids=["batch inside", "channels outside", "expanded", "shifted", "empty"],
)  # fmt: skip
def test_other_tensors_are_copied_to_the_kernel_layout(tensor: torch.Tensor) -> None:
    argument = kernel_argument("boxes", tensor, torch.float32, SHAPE)
    assert torch.equal(argument, tensor)
    assert argument.is_contiguous()
    assert argument.data_ptr() % 16 == 0


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3), (2, 3, 4, 1), ()])
def test_wrong_shape_or_dtype_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"boxes must be torch.float32 of shape \[\*, 3, 4\], not"):
        kernel_argument("boxes", torch.zeros(shape), torch.float32, SHAPE)
    with pytest.raises(ValueError, match=r"must be torch.int64 .*, not torch.float32 \[2, 3, 4\]"):
        kernel_argument("classes", torch.zeros(2, 3, 4), torch.int64, SHAPE)
