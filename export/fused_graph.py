"""A pass over an exported graph that joins convolutions with what follows them."""

from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..plugins import operations  # noqa: F401, registers what the graph is given

_HALF = (torch.float16, torch.bfloat16)
_aten, _own = torch.ops.aten, torch.ops.maskrcnn


class _Fusion(NamedTuple):
    """What is computed with a convolution."""

    last: Node
    """The follower whose value the fused operation gives; the convolution itself if none."""
    residual: Node | None
    """What is added."""
    upsampled: bool
    """Whether every value of it is added to four neighbours."""
    relu: bool


def fuse_convolutions(program: ExportedProgram) -> None:
    """Replace convolutions and what follows them by our operations, in place.

    Those are convolutions before a ReLU and, in half precision, 1x1 convolutions before an addition
    or nothing at all.

    Args:
        program: without operations in place, as `run_decompositions` leaves it.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.conv2d.default):
        images, weight, bias, stride, padding, dilation, groups = _arguments(node)
        if bias is None or groups != 1:
            continue
        fusion = _followers(node)
        with graph.inserting_after(fusion.last):
            pointwise = _is_pointwise(weight, stride, padding)
            if pointwise and (fusion.residual or not fusion.relu):
                fused = graph.call_function(
                    _own.pointwise_convolution.default,
                    (images, weight, bias, fusion.residual, stride[0], fusion.relu),
                )
            elif fusion.relu and not fusion.upsampled:
                fused = graph.call_function(
                    _own.convolution_relu.default,
                    (images, weight, bias, fusion.residual, stride, padding, dilation),
                )
            else:
                continue
        fused.meta = fusion.last.meta.copy()
        fusion.last.replace_all_uses_with(fused)
        graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _arguments(node: Node) -> tuple[Any, ...]:
    """Input, weight, bias, stride, padding, dilation and groups, defaults filled in."""
    defaults = (None, None, None, [1, 1], [0, 0], [1, 1], 1)
    return (*node.args, *defaults[len(node.args) :])


def _is_pointwise(weight: Node, stride: list[int], padding: list[int]) -> bool:
    value = weight.meta["val"]
    square = stride[0] == stride[1] and padding == [0, 0]
    return value.dtype in _HALF and value.shape[2:] == (1, 1) and square


def _followers(node: Node) -> _Fusion:
    """What may be computed with a convolution: an addition, then a ReLU, of nobody else's."""
    last, residual, upsampled = node, None, False
    addition = _only_user(last, _aten.add.Tensor)
    if addition is not None and len(addition.all_input_nodes) == 2 and not addition.kwargs:
        (other,) = (n for n in addition.all_input_nodes if n is not node)
        source = _upsampled_twofold(other)
        last, residual, upsampled = addition, source or other, source is not None
    relu = _only_user(last, _aten.relu.default)
    return _Fusion(relu or last, residual, upsampled, relu is not None)


def _only_user(node: Node, target: object) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _upsampled_twofold(node: Node) -> Node | None:
    """The map that a node repeats twice down and across, if that is what it does."""
    if node.target is not _aten.upsample_nearest2d.vec:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    fine, coarse = node.meta["val"].shape[2:], source.meta["val"].shape[2:]
    return source if all(f == 2 * c for f, c in zip(fine, coarse, strict=True)) else None
