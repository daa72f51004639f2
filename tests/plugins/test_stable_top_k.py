import numpy as np
import pytest
import torch

from maskrcnn_trt.plugins.stable_top_k import stable_top_k

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "k"), [((3, 50), 7), ((50,), 50), ((2, 3, 9), 20), ((4, 0), 3), ((2, 5), 0)]
)
def test_equals_stable_sort(shape: tuple[int, ...], k: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    # Few distinct values, so that ties abound.
    values = np.random.default_rng(0).integers(-3, 3, shape).astype(np.float32)
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    largest, indices = stable_top_k(torch.from_numpy(values).to(device), k)
    assert indices.cpu().numpy().tolist() == order.tolist()
    assert largest.cpu().numpy().tolist() == np.take_along_axis(values, order, axis=-1).tolist()


def test_orders_infinities() -> None:
    values = torch.tensor([-torch.inf, 0.0, torch.inf, -torch.inf])
    assert stable_top_k(values, 4)[1].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("k", [3, 12])
def test_registration_holds(k: int) -> None:
    torch.library.opcheck(stable_top_k, (torch.rand(2, 9), k))
