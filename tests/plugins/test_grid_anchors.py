import pytest
import torch
from cuda_graphs import replayed
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from maskrcnn_trt.plugins.grid_anchors import grid_anchors


def torchvision_anchors(
    sizes: list[tuple[int, ...]], input_size: tuple[int, int], grids: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Return the anchors of one cell [L, A, 4], and of all cells."""
    generator = AnchorGenerator(tuple(sizes), ((0.5, 1.0, 2.0),) * len(sizes))
    images = ImageList(torch.zeros(1, 3, *input_size), [input_size])
    (anchors,) = generator(images, [torch.zeros(1, 1, *grid) for grid in grids])
    return torch.stack(generator.cell_anchors), anchors


@pytest.mark.parametrize(
    ("sizes", "input_size", "grids"),
    [
        ([(32,), (64,), (128,)], (100, 168), [(25, 42), (13, 21), (7, 11)]),
        (
            [(32,), (64,), (128,), (256,), (512,)],
            (33, 70),
            [(9, 18), (5, 9), (3, 5), (2, 3), (1, 2)],
        ),
        ([(32, 64, 128, 256, 512)], (80, 96), [(5, 6)]),
        ([(32,)], (1, 1), [(1, 1)]),
    ],
    ids=["pyramid", "odd sizes", "one map", "one cell"],
)
def test_equals_torchvision(
    sizes: list[tuple[int, ...]],
    input_size: tuple[int, int],
    grids: list[tuple[int, int]],
    device: str,
) -> None:
    cells, expected = torchvision_anchors(sizes, input_size, grids)
    steps = [side // count for grid in grids for side, count in zip(input_size, grid, strict=True)]
    anchors = grid_anchors(cells.to(device), steps, [side for grid in grids for side in grid])
    assert torch.equal(anchors.cpu(), expected)


def test_map_without_cells(device: str) -> None:
    cells = torch.arange(16.0).view(2, 2, 4).to(device)
    anchors = grid_anchors(cells, [4, 4, 8, 8], [0, 5, 1, 1])
    assert torch.equal(anchors, cells[1])
    assert grid_anchors(cells, [4, 4, 8, 8], [0, 5, 3, 0]).shape == (0, 4)


@pytest.mark.gpu
def test_too_many_maps_are_rejected_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="takes 1 to 5 feature maps, not 6"):
        grid_anchors(torch.zeros(6, 1, 4).cuda(), [1, 1] * 6, [2, 2] * 6)


def test_opcheck(device: str) -> None:
    cells = torch.rand(2, 3, 4).to(device)
    torch.library.opcheck(grid_anchors, (cells, [4, 4, 8, 8], [3, 5, 2, 3]))


@pytest.mark.gpu
def test_can_be_captured() -> None:
    example, cells = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    maps = [4, 4, 8, 8], [3, 5, 2, 3]
    (anchors,) = replayed(lambda held: [grid_anchors(held, *maps)], [example], [cells])
    assert torch.equal(anchors, grid_anchors(cells, *maps))
