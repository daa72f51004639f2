"""Names of published models: addresses, checksums, and models that are not supported."""

import re

import pytest
from click.testing import CliRunner
from torchvision.models import get_weight

from maskrcnn_trt.model.weights.commands import weights
from maskrcnn_trt.model.weights.zoo import ZOO_MODELS, ZooError, is_zoo_name, zoo_model

DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2"


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("maskrcnn_resnet50_fpn", "MaskRCNN_ResNet50_FPN_Weights.COCO_V1"),
        ("maskrcnn_resnet50_fpn_v2", "MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1"),
    ],
)
def test_addresses_are_those_of_torchvision(name: str, weights: str) -> None:
    model = zoo_model(f"torchvision:{name}")
    assert model.url == get_weight(weights).url
    assert f"-{model.checksum.digest}.pth" in model.url
    assert model.checksum.algorithm == "sha256"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (
            "mask_rcnn_R_50_FPN_3x",
            "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x/137849600/model_final_f10217.pkl",
        ),
        (
            "COCO-InstanceSegmentation/mask_rcnn_R_101_C4_3x.yaml",
            "COCO-InstanceSegmentation/mask_rcnn_R_101_C4_3x/138363239/model_final_a2914c.pkl",
        ),
        (
            "new_baselines/mask_rcnn_R_50_FPN_400ep_LSJ.py",
            "new_baselines/mask_rcnn_R_50_FPN_400ep_LSJ/42019571/model_final_14d201.pkl",
        ),
        # The short name is that of COCO's model.
        (
            "mask_rcnn_R_50_FPN_1x",
            "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x/137260431/model_final_a54504.pkl",
        ),
        (
            "LVISv0.5-InstanceSegmentation/mask_rcnn_R_50_FPN_1x",
            "LVISv0.5-InstanceSegmentation/mask_rcnn_R_50_FPN_1x/144219072/model_final_571f7c.pkl",
        ),
        ("mask_rcnn_R_50_FPN", "Cityscapes/mask_rcnn_R_50_FPN/142423278/model_final_af9cf5.pkl"),
    ],
)
def test_addresses_are_those_of_detectron2(name: str, path: str) -> None:
    model = zoo_model(f"detectron2:{name}")
    assert model.url == f"{DETECTRON2}/{path}"
    assert f"_{model.checksum.digest}.pkl" in path
    assert model.checksum.algorithm == "md5"


def test_every_name_is_unique_and_resolves() -> None:
    assert len({str(model) for model in ZOO_MODELS}) == len(ZOO_MODELS)
    assert len({model.file_name for model in ZOO_MODELS}) == len(ZOO_MODELS)
    assert all(is_zoo_name(model) and zoo_model(str(model)) is model for model in ZOO_MODELS)
    assert not any(map(is_zoo_name, ("model.pth", "https://torchvision:80/x", "torchvision")))


def test_the_list_has_every_name_and_licence() -> None:
    result = CliRunner().invoke(weights, ["list"])
    words = result.output.split()
    assert all(str(model) in words for model in ZOO_MODELS)
    assert "CC BY-SA 3.0" in result.output


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("torchvision:maskrcnn_resnet_50_fpn", "torchvision:maskrcnn_resnet50_fpn"),
        ("detectron2:mask_rcnn_R50_FPN_3x", "detectron2:mask_rcnn_R_50_FPN_3x"),
    ],
)
def test_unknown_names_have_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(ZooError, match=rf"did you mean {re.escape(suggestion)}\?"):
        zoo_model(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torchvision:fasterrcnn_resnet50_fpn", "without masks"),
        ("torchvision:keypointrcnn_resnet50_fpn", "keypoints"),
        ("detectron2:COCO-Detection/retinanet_R_50_FPN_1x.yaml", "without masks"),
        ("detectron2:mask_rcnn_X_101_32x8d_FPN_3x", "ResNeXt"),
        ("detectron2:mask_rcnn_regnety_4gf_dds_FPN_100ep_LSJ", "RegNet"),
        ("detectron2:Misc/cascade_mask_rcnn_R_50_FPN_3x", "cascade"),
        ("detectron2:mask_rcnn_R_50_FPN_3x_dconv_c3-c5", "deformable"),
    ],
)
def test_models_that_cannot_be_computed_have_a_reason(name: str, reason: str) -> None:
    with pytest.raises(ZooError, match=f"is not supported: .*{reason}"):
        zoo_model(name)
