from operator import attrgetter

import pytest

from maskrcnn_trt.model.config.overrides import OverrideError, values_by_key, with_overrides
from maskrcnn_trt.model.config.reference import text_from_value
from maskrcnn_trt.model.config.schema import ModelConfig


def test_overrides_replace_single_values() -> None:
    values = {"backbone": {"name": "resnet50"}, "num_classes": 80}
    changed = with_overrides(
        values, ["backbone.norm_eps=0", "roi.aligned=true", "anchors.sizes=[8, 16]", "num_classes="]
    )
    assert changed == {
        "backbone": {"name": "resnet50", "norm_eps": 0},
        "roi": {"aligned": True},
        "anchors": {"sizes": [8, 16]},
        "num_classes": None,
    }
    assert with_overrides({"val": None}, ["val.images=x"]) == {"val": {"images": "x"}}
    assert values == {"backbone": {"name": "resnet50"}, "num_classes": 80}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("roi.aligned", "'roi.aligned' is not of the form key.path=value"),
        ("=1", "'=1' is not of the form key.path=value"),
        ("a=[", "'a=[' is not YAML"),
        ("a={b: 1, b: 2}", "the key b occurs twice"),
        ("a=2026-13-45", "invalid timestamp"),
        ("num_classes.a=1", "num_classes is a value, not a section"),
    ],
)
def test_invalid_overrides_are_rejected(override: str, problem: str) -> None:
    with pytest.raises(OverrideError) as caught:
        with_overrides({"num_classes": 80}, [override])
    assert problem in str(caught.value)
    assert override.partition("=")[0] in str(caught.value)


def test_a_single_string_is_not_a_list_of_overrides() -> None:
    with pytest.raises(OverrideError, match="'num_classes=1'; give a list"):
        with_overrides({}, "num_classes=1")


def test_values_by_dotted_key() -> None:
    assert values_by_key(ModelConfig().model_dump())["roi.sampling.batch_size_per_image"] == 512


@pytest.mark.parametrize("key", ["pixel_mean", "rpn.smooth_l1_beta", "roi.aligned", "num_classes"])
def test_formatted_value_survives_a_round_trip(key: str) -> None:
    config = ModelConfig()
    override = f"{key}={text_from_value(attrgetter(key)(config))}"
    again = ModelConfig.model_validate(with_overrides({}, [override]))
    assert attrgetter(key)(again) == attrgetter(key)(config)
