import pytest

from maskrcnn_trt.model.config import ModelConfig
from maskrcnn_trt.model.overrides import OverrideError, text_from_value, value_at, with_overrides


def test_values_are_set_one_by_one_and_the_rest_is_kept() -> None:
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
    assert values == {"backbone": {"name": "resnet50"}, "num_classes": 80}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roi.aligned", "'roi.aligned' is not of the form key.path=value"),
        ("=1", "'=1' is not of the form key.path=value"),
        ("a=[", "the value of override 'a=[' is not YAML: while parsing a flow node"),
        ("a={b: 1, b: 2}", "the value of override 'a={b: 1, b: 2}' is not YAML: the key b comes"),
        ("a=2026-13-45", "the value of override 'a=2026-13-45' is not YAML: no usable timestamp"),
        ("num_classes.a=1", "num_classes.a: num_classes is a value, not a section"),
    ],
)
def test_what_is_wrong_with_an_override_is_said(override: str, message: str) -> None:
    with pytest.raises(OverrideError) as caught:
        with_overrides({"num_classes": 80}, [override])
    assert str(caught.value).removeprefix("override ").startswith(message)


def test_null_is_an_empty_section() -> None:
    assert with_overrides({"val": None}, ["val.images=x"]) == {"val": {"images": "x"}}


def test_a_value_is_found_at_its_key() -> None:
    assert value_at(ModelConfig(), "roi.sampling.batch_size_per_image") == 512


@pytest.mark.parametrize("key", ["pixel_mean", "rpn.smooth_l1_beta", "roi.aligned", "num_classes"])
def test_an_override_of_a_values_own_text_changes_nothing(key: str) -> None:
    config = ModelConfig()
    override = f"{key}={text_from_value(value_at(config, key))}"
    again = ModelConfig.model_validate(with_overrides({}, [override]))
    assert value_at(again, key) == pytest.approx(value_at(config, key), rel=1e-5)
