"""Graph passes that fuse convolutions with the operations after them."""

import operator
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...plugins import operations  # noqa: F401, registers the fused operations
from ...plugins.block_transition import can_fuse_transition
from ...plugins.fused_convolution.expand_reduce import can_expand_reduce

_HALF = (torch.float16, torch.bfloat16)
# Minimum number of input and output channels for which libraries can be faster than Triton.
_LIBRARY_CHANNELS = 64
_aten, _own = torch.ops.aten, torch.ops.maskrcnn


class _Fusion(NamedTuple):
    """Operations after a convolution that can be computed in one kernel with the convolution."""

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

    In fp32, convolutions are replaced if a ReLU follows. In fp16 and bf16, 1x1 convolutions and
    convolutions without an addition are replaced too. An addition directly after a replaced
    convolution is fused. Convolutions without bias, or with groups, stay as they are.

    Args:
        program: exported program after `run_decompositions`, so without in-place operations.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.conv2d.default):
        images, weight, bias, stride, padding, dilation, groups = _arguments(node)
        if bias is None or groups != 1:
            continue
        fusion = _fusion_after(node)
        with graph.inserting_after(fusion.last):
            half = weight.meta["val"].dtype in _HALF
            pointwise = half and _is_pointwise(weight, stride, padding)
            window = stride, padding, dilation
            if pointwise and (fusion.residual or not fusion.relu):
                fused = graph.call_function(
                    _own.pointwise_convolution.default,
                    (images, weight, bias, fusion.residual, stride[0], fusion.relu),
                )
            elif pointwise and stride == [1, 1]:
                fused = graph.call_function(
                    _own.gemm_convolution.default, (images, weight, bias, None, True)
                )
            elif half and fusion.residual is None:
                fused = graph.call_function(
                    _own.cudnn_convolution.default, (images, weight, bias, *window, fusion.relu)
                )
            elif fusion.relu and not fusion.upsampled:
                fused = graph.call_function(
                    _own.convolution_relu.default,
                    (images, weight, bias, fusion.residual, *window),
                )
            else:
                continue
        fused.meta = fusion.last.meta.copy()
        fusion.last.replace_all_uses_with(fused)
        graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def fuse_blocks(program: ExportedProgram) -> None:
    """Fuse a residual block's last convolution with the next block's first convolution, in place.

    If the block's shortcut has a convolution, it is fused too where a kernel supports that.

    Args:
        program: program after `fuse_convolutions`.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_own.pointwise_convolution.default):
        arguments: tuple[Any, ...] = node.args
        *_, residual, stride, relu = arguments
        following = _reduction_after(node)
        whole = residual is not None and residual.meta["val"].shape == node.meta["val"].shape
        if following is None or not (whole and relu) or stride != 1:
            continue
        fused = _transition(node, following)
        if fused is None:
            continue
        with graph.inserting_after(node):
            both = graph.call_function(*fused)
        both.meta["val"] = (node.meta["val"], following.meta["val"])
        with graph.inserting_after(both):
            results = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
        for result, replaced in zip(results, (node, following), strict=True):
            result.meta = replaced.meta.copy()
            replaced.replace_all_uses_with(result)
            graph.erase_node(replaced)
    graph.eliminate_dead_code()  # convolutions of shortcuts
    graph.lint()
    program.graph_module.recompile()


def _transition(last: Node, first: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return an operation and its arguments that replace two convolutions, or None.

    None: no operation supports these convolutions.

    Args:
        last: `pointwise_convolution` that ends a residual block and adds the residual.
        first: `gemm_convolution` that begins the next block.
    """
    ending: tuple[Any, ...] = last.args
    beginning: tuple[Any, ...] = first.args
    images, weight, bias, residual, *_ = ending
    _, *reduction, _, _ = beginning
    shortcuts: list[tuple[Any, ...]] = [(residual, None, None)]
    if residual.target is _own.pointwise_convolution.default and len(residual.users) == 1:
        *convolution, added, stride, relu = residual.args
        if added is None and stride == 1 and not relu:
            shortcuts.insert(0, tuple(convolution))
    for shortcut in shortcuts:
        weights = weight, shortcut[1], reduction[0]
        if can_fuse_transition(*(node and node.meta["val"] for node in weights)):
            arguments = (images, weight, bias, *shortcut, *reduction)
            return _own.block_transition.default, arguments
    if can_expand_reduce(weight.meta["val"], reduction[0].meta["val"]):
        return _own.expand_reduce.default, (images, weight, bias, residual, *reduction)
    return None


def use_libraries(program: ExportedProgram) -> None:
    """Let a library compute 1x1 convolutions for which it may have a faster kernel, in place.

    Args:
        program: program after `fuse_blocks`.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_own.pointwise_convolution.default):
        arguments: tuple[Any, ...] = node.args
        images, weight, bias, residual, stride, relu = arguments
        whole = residual is None or residual.meta["val"].shape == node.meta["val"].shape
        if min(weight.meta["val"].shape[:2]) < _LIBRARY_CHANNELS:
            continue
        if whole and stride == 1:
            node.target = _own.gemm_convolution.default
            node.args = (images, weight, bias, residual, relu)
        elif residual is None:  # and without a ReLU, or `cudnn_convolution` would compute it
            node.target = _own.cudnn_convolution.default
            node.args = (images, weight, bias, [stride] * 2, [0, 0], [1, 1], False)
    graph.lint()
    program.graph_module.recompile()


def _reduction_after(node: Node) -> Node | None:
    """Return the 1x1 convolution that reads `node` and can be fused with it, or None.

    Only a convolution with stride 1, a ReLU and no residual can be fused.
    """
    for user in node.users:
        if user.target is _own.gemm_convolution.default:
            images, _, _, residual, relu = user.args
            if images is node and residual is None and relu:
                return user
    return None


def _arguments(node: Node) -> tuple[Any, ...]:
    """Return input, weight, bias, stride, padding, dilation and groups of an ATen convolution."""
    defaults = (None, None, None, [1, 1], [0, 0], [1, 1], 1)
    return (*node.args, *defaults[len(node.args) :])


def _is_pointwise(weight: Node, stride: list[int], padding: list[int]) -> bool:
    square = stride[0] == stride[1] and padding == [0, 0]
    return weight.meta["val"].shape[2:] == (1, 1) and square


def _fusion_after(node: Node) -> _Fusion:
    """Return the addition and the ReLU that can be fused with the convolution `node`, if any.

    The addition must be the only reader of the convolution's result. The ReLU must be the only
    reader of the addition's result or, without an addition, of the convolution's result.
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
