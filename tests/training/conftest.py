from pathlib import Path

import pytest
from tiny_run import CLASSES, write_config

from maskrcnn_trt.training.data.synthetic import SyntheticConfig, draw_dataset


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration file of a run of seconds: a narrow model on twelve small pictures."""
    folder = tmp_path_factory.mktemp("tiny")
    config = SyntheticConfig(train=12, val=5, width=96, height=64, seed=3, classes=CLASSES)
    draw_dataset(folder, config)
    return write_config(folder)
