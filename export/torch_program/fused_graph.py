"""Graph passes that fuse convolutions with the operations after them."""

import operator
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ...plugins import operations  # noqa: F401, registers the fused operations
from ...plugins.fused_convolution.block_transition import can_fuse_middle, can_fuse_transition
from ...plugins.runtime.arguments import HALF_TYPES

# Minimum number of input and output channels for which cuBLASLt and cuDNN can be faster than a
# Triton kernel.
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

    If an addition, a ReLU or both follow the convolution, the fused operation includes them. These
    convolutions are not replaced:

    - in any precision: convolutions without bias, or with groups.
    - in fp32: convolutions without ReLU, or with the addition of a tensor upsampled twofold.
    - in fp16 and bf16: convolutions larger than 1x1 with an addition but without ReLU, or with the
      addition of a tensor upsampled twofold.

    Args:
        program: exported torch program. `run_decompositions` has replaced its in-place operations.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_aten.conv2d.default):
        _, _, bias, *_, groups = _arguments(node)
        if bias is None or groups != 1:
            continue
        fusion = _fusion_after(node)
        replacement = _replacement(node, fusion)
        if replacement is None:
            continue
        with graph.inserting_after(fusion.last):
            fused = graph.call_function(*replacement)
        fused.meta = fusion.last.meta.copy()
        fusion.last.replace_all_uses_with(fused)
        graph.eliminate_dead_code()
    graph.lint()
    program.graph_module.recompile()


def _replacement(node: Node, fusion: _Fusion) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the operation that replaces a convolution, and the operation's arguments.

    None: no operation supports the convolution.
    """
    images, weight, bias, stride, padding, dilation, _ = _arguments(node)
    convolution, window = (images, weight, bias), (stride, padding, dilation)
    residual, relu = fusion.residual, fusion.relu
    if weight.meta["val"].dtype in HALF_TYPES:
        pointwise = _is_pointwise(weight, stride, padding)
        # With fewer channels, cuBLASLt and cuDNN can be faster than Triton only if a ReLU directly
        # follows the convolution.
        wide = min(weight.meta["val"].shape[:2]) >= _LIBRARY_CHANNELS or (relu and residual is None)
        if pointwise and wide and stride == [1, 1] and not fusion.upsampled:
            return _own.gemm_convolution.default, (*convolution, residual, relu)
        if residual is None and (wide or not pointwise):
            return _own.cudnn_convolution.default, (*convolution, *window, relu)
        if pointwise:
            return (
                _own.pointwise_convolution.default,
                (*convolution, residual, stride[0], relu),
            )
    if relu and not fusion.upsampled:
        return _own.convolution_relu.default, (*convolution, residual, *window)
    return None


def fuse_blocks(program: ExportedProgram) -> None:
    """Fuse a residual block's last convolution with the next block's first convolution, in place.

    The two are fused if a kernel supports them. If the shortcut of the earlier block also has a
    convolution, and a kernel supports all three, this third convolution is fused, too.

    Args:
        program: exported torch program, which `fuse_convolutions` has changed.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_own.gemm_convolution.default):
        *_, residual, relu = node.args
        following = _reduction_after(node)
        if following is None or residual is None or not relu:
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
    graph.eliminate_dead_code()  # removes the separate convolutions of fused shortcuts
    graph.lint()
    program.graph_module.recompile()


def fuse_middle_convolutions(program: ExportedProgram) -> None:
    """Fuse middle convolutions of residual blocks into the `block_transition` after them, in place.

    A `block_transition` is the operation that `fuse_blocks` has inserted for the end of a block and
    the start of the next one. A middle convolution is fused if a kernel supports it, and no other
    operation reads its result.

    Args:
        program: exported torch program, which `fuse_blocks` has changed.
    """
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=_own.block_transition.default):
        middle, *others = node.args
        if middle.target is not _own.cudnn_convolution.default:
            continue
        if len(middle.users) != 1 or middle in others:  # another operation needs its result, too
            continue
        images, weight, bias, *window, relu = middle.args
        keeps_size = window == [[1, 1], [1, 1], [1, 1]]  # stride, padding and dilation
        if keeps_size and relu and can_fuse_middle(weight.meta["val"]):
            node.args = (images, *others, weight, bias)
            graph.erase_node(middle)
    graph.lint()
    program.graph_module.recompile()


def _transition(last: Node, first: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the fused operation that replaces two convolutions, and the operation's arguments.

    Return None if no operation supports `last` and `first`. If the shortcut beside `last` has a
    convolution, and a kernel supports all three convolutions, the operation replaces all three.

    Args:
        last: `gemm_convolution` that ends a residual block and adds the residual.
        first: `gemm_convolution` that begins the next block.
    """
    ending: tuple[Any, ...] = last.args
    beginning: tuple[Any, ...] = first.args
    images, weight, bias, residual, _ = ending
    _, *reduction, _, _ = beginning
    shortcuts: list[tuple[Any, ...]] = [(residual, None, None)]
    if residual.target is _own.gemm_convolution.default and len(residual.users) == 1:
        *convolution, added, relu = residual.args
        if added is None and not relu:
            shortcuts.insert(0, tuple(convolution))
    for shortcut in shortcuts:
        weights = weight, shortcut[1], reduction[0]
        if can_fuse_transition(*(node and node.meta["val"] for node in weights)):
            arguments = (images, weight, bias, *shortcut, *reduction)
            return _own.block_transition.default, arguments
    return None


def _reduction_after(node: Node) -> Node | None:
    """Return the 1x1 convolution after the convolution `node`, if the two can be fused, else None.

    The 1x1 convolution must read the result of `node`, have stride 1 and a ReLU, and add no
    residual.
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
    """Return the addition and the ReLU that can be fused with the convolution `node`.

    If neither can be fused, the result describes the convolution alone.

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
    """If `node` is a twofold nearest-neighbor upsampling, return its input, else None."""
    if node.target is not _aten.upsample_nearest2d.vec:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    fine, coarse = node.meta["val"].shape[2:], source.meta["val"].shape[2:]
    return source if all(f == 2 * c for f, c in zip(fine, coarse, strict=True)) else None
