"""Reading of weights files, and rejection of files that would run code."""

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.weights.files import WeightsError, local_path, read_file
from maskrcnn_trt.model.weights.recognition import read_weights

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


class CallWhenUnpickled:
    """Object whose unpickling calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_arrays_are_read(protocol: int, tmp_path: Path) -> None:
    content = OrderedDict(blobs={"conv1_w": ARRAY, "lr": np.float64(0.02)}, cfg="{}")
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    read = read_file(path)
    assert read["blobs"]["lr"] == 0.02
    assert np.array_equal(read["blobs"]["conv1_w"], ARRAY)


def test_arrays_of_python_2_are_read(tmp_path: Path) -> None:
    """Bytes are those of `cPickle.dump({'conv1_w': numpy.arange(2, dtype='<f4')}, file, 2)`."""
    path = tmp_path / "R-50.pkl"
    path.write_bytes(
        b"\x80\x02}q\x01U\x07conv1_wq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray"
        b"\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x02\x85cnumpy\ndtype\nq\x06U\x02f4K\x00K\x01\x87Rq"
        b"\x07(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08\x00\x00\x00\x00\x00"
        b"\x00\x80?tbs."
    )
    assert read_file(path)["conv1_w"].tolist() == [0, 1]


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_are_read(zipped: bool, tmp_path: Path) -> None:
    content = {
        "model": {"a": torch.ones(2, dtype=torch.float16), "b": ARRAY},
        "args": argparse.Namespace(lr=0.02),
        "ap": np.float64(0.377),
    }
    path = tmp_path / "model.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    read = read_file(path)
    assert torch.equal(read["model"]["a"], content["model"]["a"])
    assert np.array_equal(read["model"]["b"], ARRAY)
    assert read["ap"] == 0.377


def attacks(created: Path) -> dict[str, tuple[Any, str]]:
    """Return objects that would create a file when unpickled, with the expected messages."""
    command = f"touch {created}"
    text = f"open({str(created)!r}, 'w')"
    reconstruct = np.empty(0).__reduce__()[0]
    return {
        "a shell": (
            CallWhenUnpickled(os.system, command),
            r"call posix\.system, .* could run any code; save .*torch\.save",
        ),
        "eval": (CallWhenUnpickled(eval, text), r"call (builtins\.)?eval"),
        "getattr": (CallWhenUnpickled(getattr, "text", "join"), r"call (builtins\.)?getattr"),
        "an array of another class": (
            CallWhenUnpickled(reconstruct, CallWhenUnpickled, (0,), b"b"),
            r"CallWhenUnpickled",
        ),
        "a shell in an array": (
            np.array([CallWhenUnpickled(os.system, command)]),
            r"posix\.system|is damaged",
        ),
        "a shell as a dtype": (
            CallWhenUnpickled(np.dtype, CallWhenUnpickled(os.system, command)),
            r"posix\.system",
        ),
        "torch's own loader": (
            CallWhenUnpickled(torch.load, str(created)),
            r"torch\.serialization\.load",
        ),
        "numpy's loader": (CallWhenUnpickled(np.load, str(created)), r"numpy.*\.load"),
    }


@pytest.mark.parametrize("kind", attacks(Path()))
@pytest.mark.parametrize("container", ["pickle", "zip", "legacy"])
def test_files_with_code_are_rejected(kind: str, container: str, tmp_path: Path) -> None:
    """The code does not run: it would create a file."""
    created, path = tmp_path / "ran", tmp_path / "model"
    attack, message = attacks(created)[kind]
    content = {"conv1_w": ARRAY, "model": {"nested": attack}}
    if container == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == "zip")
    with pytest.raises(WeightsError, match=message) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    assert not created.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cnumpy\nndarray\n(S'__class__'\nI1\nd\x86b.",
        b"cnumpy\nload.__globals__\n.",
        b"cnumpy.core.multiarray\n_reconstruct\n(S'x'\nI1\nI1\ntR.",
        b"c_codecs\nencode\n(V\xe9\nS'zlib'\ntR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0endarray.mro\x93.",
        b"Pid\n.",
        b"\x82\x01.",
    ],
)
def test_crafted_pickles_are_rejected(opcodes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(opcodes)
    with pytest.raises(WeightsError, match=r"model\.pkl (would call|is damaged)"):
        read_file(path)


def test_pickled_tensors_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"conv1.weight": torch.ones(1)}))
    with pytest.raises(WeightsError, match=r"call torch\..*torch\.save\(model\.state_dict"):
        read_file(path)


@pytest.mark.parametrize("suffix", [".pth", ".pkl"])
def test_truncated_files_are_rejected(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save({"model": {"a": torch.ones(100)}}, path)
    else:
        path.write_bytes(pickle.dumps({"a": np.ones(100)}))
    content = path.read_bytes()
    for kept in (0, 3, 20, 200, -1):
        path.write_bytes(content[:kept])
        with pytest.raises(WeightsError, match=r"damaged.*\.pth or \.pkl") as caught:
            read_file(path)
        assert "\n" not in str(caught.value)


def test_missing_files_folders_and_read_errors_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot read /proc/self/mem: Input/output error; make"):
        read_file(Path("/proc/self/mem"))
    with pytest.raises(WeightsError, match=r"none\.pth does not exist"):
        read_file(tmp_path / "none.pth")
    with pytest.raises(WeightsError, match="is a folder"):
        read_file(tmp_path)


def test_a_local_file_may_have_the_form_of_torchvisions_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("My_Weights.pth").touch()
    assert local_path("My_Weights.pth") == Path("My_Weights.pth")


@pytest.mark.parametrize(
    "content", [{}, [], 3, torch.ones(2), {"model": {"conv.weight": torch.ones(1)}}, {1: 2}]
)
def test_files_of_unknown_origin_are_rejected(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(WeightsError, match=r"supported program.*torchvision, detectron2, "):
        read_weights(path)


@pytest.mark.parametrize("stem", [torch.tensor(1.0), torch.ones(64)])
def test_unexpected_tensor_shapes_are_rejected(stem: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    body = {f"layer3.{i}.conv{k}.weight": torch.ones(1) for i in range(6) for k in (1, 2, 3)}
    state = {"backbone.body.stem.conv1.weight": stem}
    torch.save(state | {f"backbone.body.{n}": t for n, t in body.items()}, path)
    with pytest.raises(WeightsError, match=r"maskrcnn-benchmark.* shapes"):
        read_weights(path)
