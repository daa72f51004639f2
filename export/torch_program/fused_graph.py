"""Graph passes that fuse convolutions with the operations after them."""

import operator
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...plugins import operations  # noqa: F401, registers the fused operations
from ...plugins.fused_convolution.expand_reduce import can_fuse

_HALF = (torch.float16, torch.bfloat16)
_aten, _own = torch.ops.aten, torch.ops.maskrcnn


class _Fusion(NamedTuple):
    """Operations after a convolution that are fused with the convolution."""

    # Node whose value the fused operation returns: ReLU, addition, or the convolution itself.
    last: Node
    # Tensor that is added to the convolution's output. None: no addition is fused.
    residual: Node | None
    # Whether the residual is upsampled twofold before the addition.
    upsampled: bool
    # Whether a ReLU is fused.
    relu: bool


def fuse_convolutions(program: ExportedProgram) -> None:
    """Replace convolutions and the operations after them by fused operations, in place.

    A convolution is fused if a ReLU follows, or if it is a 1x1 convolution in fp16 or bf16. An
    addition directly after the convolution is fused too. Convolutions without bias, or with groups,
    stay as they are.

    Args:
        program: result of `run_decompositions`, which has no in-place operations.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.conv2d.default):
        images, weight, bias, stride, padding, dilation, groups = _arguments(node)
        if bias is None or groups != 1:
            continue
        fusion = _fusion_after(node)
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


def fuse_blocks(program: ExportedProgram) -> None:
    """Fuse the last convolution of a residual block with the next block's first one, in place.

    Args:
        program: result of `fuse_convolutions`.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_own.pointwise_convolution.default):
        arguments: tuple[Any, ...] = node.args
        images, weight, bias, residual, stride, relu = arguments
        following = _reduction_after(node)
        whole = residual is not None and residual.meta["val"].shape == node.meta["val"].shape
        if following is None or not (whole and relu) or stride != 1:
            continue
        next_arguments: tuple[Any, ...] = following.args
        _, next_weight, next_bias, *_ = next_arguments
        if not can_fuse(weight.meta["val"], next_weight.meta["val"]):
            continue
        with graph.inserting_after(node):
            both = graph.call_function(
                _own.expand_reduce.default,
                (images, weight, bias, residual, next_weight, next_bias),
            )
        both.meta["val"] = (node.meta["val"], following.meta["val"])
        with graph.inserting_after(both):
            results = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
        for result, replaced in zip(results, (node, following), strict=True):
            result.meta = replaced.meta.copy()
            replaced.replace_all_uses_with(result)
            graph.erase_node(replaced)
    graph.lint()
    program.graph_module.recompile()


def _reduction_after(node: Node) -> Node | None:
    """Return the 1x1 convolution that reads `node` and can be fused with it, or None.

    Only a convolution with stride 1, a ReLU and no residual can be fused.
    """
    for user in node.users:
        if user.target is _own.convolution_relu.default:
            arguments: tuple[Any, ...] = user.args
            images, weight, _, residual, stride, padding, _ = arguments
            plain = images is node and residual is None and stride == [1, 1]
            if plain and _is_pointwise(weight, stride, padding):
                return user
    return None


def _arguments(node: Node) -> tuple[Any, ...]:
    """Return a convolution's input, weight, bias, stride, padding, dilation and groups."""
    defaults = (None, None, None, [1, 1], [0, 0], [1, 1], 1)
    return (*node.args, *defaults[len(node.args) :])


def _is_pointwise(weight: Node, stride: list[int], padding: list[int]) -> bool:
    value = weight.meta["val"]
    square = stride[0] == stride[1] and padding == [0, 0]
    return value.dtype in _HALF and value.shape[2:] == (1, 1) and square


def _fusion_after(node: Node) -> _Fusion:
    """Return the addition and the ReLU that can be fused with the convolution `node`, if any.

    Each of the two must be the only node that reads the result of the node before it.
    """
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
    """Return the input of `node` if it is a twofold nearest-neighbor upsampling, else None."""
    if node.target is not _aten.upsample_nearest2d.vec:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    fine, coarse = node.meta["val"].shape[2:], source.meta["val"].shape[2:]
    return source if all(f == 2 * c for f, c in zip(fine, coarse, strict=True)) else None
