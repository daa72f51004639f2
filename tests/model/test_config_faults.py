"""What is said of keys that are no names of settings."""

from typing import Any

import pytest
from pydantic import ValidationError

from maskrcnn_trt.model.config import ModelConfig
from maskrcnn_trt.model.config_faults import sentence_from_fault


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({1: 2}, "unknown key 1; allowed here: num_classes, "),
        ({None: 2}, "unknown key None; allowed here: num_classes, "),
        ({"backbone": {1.5: 2}}, "unknown key backbone.1.5 (did you mean backbone.norm?); allowed"),
        ({"a.b": 2}, "unknown key a.b; allowed here: num_classes, "),
        ({"backbone": {"nam": 2}}, "unknown key backbone.nam (did you mean backbone.name?); "),
        ({"fpn_norm": 2}, "unknown key fpn_norm (did you mean backbone.fpn_norm?); "),
    ],
)
def test_unknown_keys_are_named(values: dict[Any, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(values)
    assert sentence_from_fault(caught.value, ModelConfig).startswith(sentence)
