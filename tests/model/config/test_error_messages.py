"""Error messages for unknown configuration keys and unsupported settings."""

from typing import Any

import pytest
from pydantic import ValidationError

from maskrcnn_trt.model.config.error_messages import validation_message
from maskrcnn_trt.model.config.schema import ModelConfig


@pytest.mark.parametrize(
    ("values", "key", "suggestion"),
    [
        ({1: 2}, "1", None),
        ({None: 2}, "None", None),
        ({"backbone": {1.5: 2}}, "backbone.1.5", "backbone.norm"),
        ({"a.b": 2}, "a.b", None),
        ({"backbone": {"nam": 2}}, "backbone.nam", "backbone.name"),
        ({"fpn_norm": 2}, "fpn_norm", "backbone.fpn_norm"),
    ],
)
def test_unknown_key_message(values: dict[Any, Any], key: str, suggestion: str | None) -> None:
    """The message names the key, a similar one if there is one, and the allowed keys."""
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(values)
    message = validation_message(caught.value, ModelConfig)
    assert message.startswith(f"unknown key {key}")
    assert (f"did you mean {suggestion}?" in message) == (suggestion is not None)
    assert "allowed here: " in message


def test_group_norm_without_whole_groups_is_rejected() -> None:
    values = {"roi": {"head_norm": "gn", "mask_head_dim": 100}}
    with pytest.raises(ValidationError, match=r"32 as roi\.mask_head_dim, not 100"):
        ModelConfig.model_validate(values)
