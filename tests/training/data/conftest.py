import pytest

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    """Data set of fourteen small images, half of them portraits."""
    folder = tmp_path_factory.mktemp("synthetic")
    draw_dataset(folder, SyntheticConfig(train=14, val=1, width=96, height=64, seed=3))
    return DatasetConfig(images=folder / "train", annotations=folder / "annotations/train.json")
