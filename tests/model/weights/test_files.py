"""Weights files are read, and nothing in them runs."""

import argparse
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.weights.files import WeightsError, read_file
from maskrcnn_trt.model.weights.recognition import read_weights

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


class Runs:
    """Unpickled as a call of any function."""

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
    """As `cPickle.dump({'conv1_w': numpy.arange(2, dtype='<f4')}, file, 2)` wrote them."""
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


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    command = f"touch {mark}"
    text = f"open({str(mark)!r}, 'w')"
    reconstruct = np.empty(0).__reduce__()[0]
    return {
        "a shell": (
            Runs(os.system, command),
            r"asks for posix\.system, which is not part of weights and could run code; save ",
        ),
        "eval": (Runs(eval, text), r"asks for (builtins\.)?eval"),
        "getattr": (Runs(getattr, "text", "join"), r"asks for (builtins\.)?getattr"),
        "an array of another class": (Runs(reconstruct, Runs, (0,), b"b"), r"test_files\.Runs"),
        "a shell in an array": (np.array([Runs(os.system, command)]), r"posix\.system|is damaged"),
        "a shell as a dtype": (Runs(np.dtype, Runs(os.system, command)), r"posix\.system"),
        "torch's own loader": (Runs(torch.load, str(mark)), r"torch\.serialization\.load"),
        "numpy's loader": (Runs(np.load, str(mark)), r"numpy.*\.load"),
    }


@pytest.mark.parametrize("kind", attacks(Path()))
@pytest.mark.parametrize("container", ["pickle", "zip", "legacy"])
def test_code_in_a_file_is_refused_and_does_not_run(
    kind: str, container: str, tmp_path: Path
) -> None:
    mark, path = tmp_path / "ran", tmp_path / "model"
    attack, message = attacks(mark)[kind]
    content = {"conv1_w": ARRAY, "model": {"nested": attack}}
    if container == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=container == "zip")
    with pytest.raises(WeightsError, match=message) as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    assert not mark.exists()


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
def test_crafted_pickles_are_refused(opcodes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(opcodes)
    with pytest.raises(WeightsError, match=r"model\.pkl (asks for|is damaged)"):
        read_file(path)


def test_a_pickle_of_tensors_says_how_to_save_them(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"conv1.weight": torch.ones(1)}))
    with pytest.raises(WeightsError, match=r"asks for torch\..*torch\.save\(model\.state_dict"):
        read_file(path)


@pytest.mark.parametrize("suffix", [".pth", ".pkl"])
@pytest.mark.parametrize("kept", [0, 3, 20, 200, -1])
def test_truncated_files_are_refused(suffix: str, kept: int, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save({"model": {"a": torch.ones(100)}}, path)
    else:
        path.write_bytes(pickle.dumps({"a": np.ones(100)}))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match="is damaged or holds no weights; give a") as caught:
        read_file(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"none\.pth does not exist; give"):
        read_file(tmp_path / "none.pth")
    with pytest.raises(WeightsError, match="is a folder; give"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    "content", [{}, [], 3, torch.ones(2), {"model": {"conv.weight": torch.ones(1)}}, {1: 2}]
)
def test_files_of_no_known_origin_are_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(content, path)
    with pytest.raises(WeightsError, match="holds no weights of a known origin; give those of "):
        read_weights(path)


@pytest.mark.parametrize("stem", [torch.tensor(1.0), torch.ones(64)])
def test_tensors_of_strange_shapes_are_refused(stem: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    body = {f"layer3.{i}.conv{k}.weight": torch.ones(1) for i in range(6) for k in (1, 2, 3)}
    state = {"backbone.body.stem.conv1.weight": stem}
    torch.save(state | {f"backbone.body.{n}": t for n, t in body.items()}, path)
    with pytest.raises(WeightsError, match="has names of maskrcnn-benchmark, but tensors of shape"):
        read_weights(path)
