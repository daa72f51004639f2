"""Loading of weights that a training starts from, and rejection of incompatible ones."""

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_server import Site, serving
from foreign_states import State, caffe2, detectron2, random_state
from torchvision.models import resnet50

from maskrcnn_trt.model.checkpoint import CheckpointError
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.weights import files
from maskrcnn_trt.model.weights.files import WeightsError
from maskrcnn_trt.model.weights.loading import LoadReport, load_weights

PARTS = "head", "predictor"
MSRA = {"stride_in_1x1": True, "norm_eps": 1e-5}


def config(*, num_classes: int = 3, pixel_std: Any = (1, 1, 1), **sections: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "backbone": {"fpn_channels": 32, **MSRA},
        "roi": {"box_head_dim": 32, "mask_head_dim": 32},
    }
    merged = small | {k: small.get(k, {}) | v for k, v in sections.items()}
    return ModelConfig.model_validate(
        {"num_classes": num_classes, "pixel_std": pixel_std, **merged}
    )


DETECTRON2 = {
    "anchors": {"convention": "detectron2"},
    "rpn": {"min_side": 0},
    "roi": {"aligned": True, "sampling_ratio": 0},
}


def load(model_config: ModelConfig, source: str | Path) -> tuple[State, State, LoadReport]:
    """Load a source, and return the state before, the state after and the report."""
    with torch.device("meta"):  # random initialisation is slow
        model = MaskRCNN(model_config)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return before, dict(model.state_dict()), load_weights(model, source)


@pytest.fixture(scope="module")
def msra(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Write a backbone with merged batch norms as a Caffe2 pickle; return its tensors too."""
    state = random_state(config())
    body = {name: tensor for name, tensor in state.items() if name.startswith("backbone.body.")}
    theirs = {name: tensor.numpy() for name, tensor in caffe2(body, merged=True).items()}
    path = tmp_path_factory.mktemp("msra") / "R-50.pkl"
    extra = {"fc1000_w": theirs["conv1_w"], "conv1_b": theirs["conv1_w"]}
    path.write_bytes(pickle.dumps(theirs | extra, protocol=2))
    return path, body


def test_a_backbone_alone_leaves_the_heads_as_initialised(msra: tuple[Path, State]) -> None:
    path, body = msra
    before, after, report = load(config(), path)
    for name, tensor in after.items():
        if name.endswith("running_mean"):
            assert not tensor.any()
        elif name.endswith("running_var"):
            assert torch.equal((tensor + 1e-5).sqrt(), torch.ones_like(tensor))
        else:
            assert torch.equal(tensor, body.get(name, before[name])), name
    assert report.num_loaded == len(body)
    assert report.ignored == ("fc1000_w", "conv1_b")
    heads = [f"roi_heads.{kind}_{part}" for kind in ("box", "mask") for part in PARTS]
    assert report.initialised == ("backbone.fpn", "rpn.head", *heads)
    for words in (f"{len(body)} tensors of Caffe2", "roi_heads.mask_predictor", "fc1000_w"):
        assert words in str(report)


def test_the_fifth_stage_becomes_the_head_of_c4(msra: tuple[Path, State]) -> None:
    path, body = msra
    c4 = config(backbone={"features": "c4"}, roi={"box_pool": 14})
    _, after, report = load(c4, path)
    name = "0.conv1.weight"
    assert torch.equal(after[f"roi_heads.shared_head.{name}"], body[f"backbone.body.layer4.{name}"])
    assert "roi_heads.shared_head" not in report.initialised


def test_torchvision_classifier_is_loaded_as_backbone(tmp_path: Path) -> None:
    network = resnet50()
    torch.save(network.state_dict(), tmp_path / "resnet50.pth")
    own = config(pixel_std=(58.395, 57.12, 57.375), backbone={"stride_in_1x1": False})
    _, after, report = load(own, tmp_path / "resnet50.pth")
    assert torch.equal(after["backbone.body.layer4.2.conv3.weight"], network.layer4[2].conv3.weight)
    assert torch.equal(after["backbone.body.bn1.running_var"], network.bn1.running_var)
    assert report.ignored[:2] == ("fc.weight", "fc.bias")


def test_torchvision_network_under_detectron2_names(
    msra: tuple[Path, State], tmp_path: Path
) -> None:
    """The network takes RGB in unit deviations and strides in the 3x3."""
    names = {"backbone.body.conv1": "stem.conv1", "backbone.body.bn1": "stem.conv1.norm"}
    pattern = r"backbone\.body\.layer(\d)\.(\d+)\.(conv|bn)(\d)"
    theirs = {}
    for name, tensor in msra[1].items():
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(pattern, stem)
        if block:
            stage, index, layer, number = block.groups()
            norm = ".norm" if layer == "bn" else ""
            stem = f"res{int(stage) + 1}.{index}.conv{number}{norm}"
        stem = re.sub(r"backbone\.body\.layer(\d)", lambda m: f"res{int(m[1]) + 1}", stem)
        stem = stem.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        theirs[f"{names.get(stem, stem)}.{kind}"] = tensor.numpy()
    path = tmp_path / "R-50.pkl"
    path.write_bytes(pickle.dumps({"model": theirs, "__author__": "torchvision"}))
    own = config(pixel_std=(58.395, 57.12, 57.375), backbone={"stride_in_1x1": False})
    _, after, report = load(own, path)
    assert report.num_loaded == len(msra[1])
    assert report.ignored == ()
    assert all(torch.equal(after[name], tensor) for name, tensor in msra[1].items())


def test_conflicting_settings_are_rejected_with_the_keys_to_set(msra: tuple[Path, State]) -> None:
    path, _ = msra
    default = config(pixel_std=(58.395, 57.12, 57.375), backbone={"stride_in_1x1": False})
    with pytest.raises(CheckpointError) as caught:
        load(default, path)
    assert f"{path} of Caffe2" in str(caught.value)
    assert str(caught.value).endswith(
        "set model.backbone.stride_in_1x1=true 'model.pixel_std=[1.0, 1.0, 1.0]'"
    )
    with pytest.raises(CheckpointError, match=r"set model\.backbone\.name=resnet50$"):
        load(config(backbone={"name": "resnet101"}), path)
    with pytest.raises(CheckpointError, match=r"set model\.backbone\.norm=frozen_bn$"):
        load(config(backbone={"norm": "gn"}), path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Write a model of three classes as detectron2's trainer does; return its tensors too."""
    state = random_state(config(**DETECTRON2), background_rows=False)
    path = tmp_path_factory.mktemp("detectron2") / "model_final.pth"
    torch.save({"model": detectron2(state, pyramid=True)}, path)
    return path, state


def test_a_whole_model_is_loaded_whole(whole: tuple[Path, State]) -> None:
    path, state = whole
    _, after, report = load(config(**DETECTRON2), path)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    assert report.initialised == ()


def test_predictors_of_other_classes_keep_their_values(whole: tuple[Path, State]) -> None:
    path, state = whole
    before, after, report = load(config(num_classes=5, **DETECTRON2), path)
    predictors = [n for n in state if "cls_score" in n or "bbox_pred.w" in n or "fcn_logits" in n]
    predictors += ["roi_heads.box_predictor.bbox_pred.bias"]
    for name, tensor in after.items():
        stays = name in predictors and name.startswith("roi_heads")
        assert torch.equal(tensor, before[name] if stays else state[name]), name
    initialised = "roi_heads.box_predictor", "roi_heads.mask_predictor.mask_fcn_logits"
    assert report.initialised == initialised


def test_other_conventions_are_rejected(whole: tuple[Path, State]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(config(), whole[0])
    keys = str(caught.value).partition("set ")[2].split()
    changes = "anchors.convention=detectron2", "roi.aligned=true", "roi.sampling_ratio=0"
    assert keys == [f"model.{change}" for change in changes]


def test_incomplete_files_are_rejected(whole: tuple[Path, State], tmp_path: Path) -> None:
    content = torch.load(whole[0])["model"]
    del content["backbone.bottom_up.res3.1.conv2.weight"]
    torch.save(content, tmp_path / "cut.pth")
    with pytest.raises(
        CheckpointError, match=r"lacks the tensors backbone\.body\.layer2\.1\.conv2\.weight"
    ):
        load(config(**DETECTRON2), tmp_path / "cut.pth")


def test_weights_that_are_not_finite_are_rejected(
    whole: tuple[Path, State], tmp_path: Path
) -> None:
    content = torch.load(whole[0])["model"]
    content["backbone.bottom_up.res3.1.conv2.weight"][0, 0, 0, 0] = torch.nan
    torch.save(content, tmp_path / "nan.pth")
    with pytest.raises(CheckpointError, match=r"nan\.pth: tensor .*layer2\.1\.conv2.* has NaN"):
        load(config(**DETECTRON2), tmp_path / "nan.pth")


def test_torchvision_weight_names_are_resolved(
    msra: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Site({"resnet50.pkl": msra[0].read_bytes()})) as site:
        entry = SimpleNamespace(url=f"{site.url}/resnet50.pkl")
        monkeypatch.setattr(files, "get_weight", {"ResNet50_Weights.IMAGENET1K_V1": entry}.get)
        load(config(), "ResNet50_Weights.IMAGENET1K_V1")
        assert len(site.requested_ranges) == 1
    monkeypatch.undo()
    with pytest.raises(WeightsError, match=r"torchvision has no weights ResNet50_Weights\.V9;"):
        load(config(), "ResNet50_Weights.V9")
