"""Wheel in new environments: without extras, with the extra `cpu`; and packages of all extras."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from check_release import package_files
from packaging.requirements import Requirement
from PIL import Image

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd="/", env=environment
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the build leaves no files in the working tree."""
    folder = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, folder / "source")
    return next(folder.glob("*.whl"))


def distributions(name: str = "maskrcnn-trt", extra: str = "") -> Iterator[str]:
    """Yield the names of a distribution's requirements, recursively, with those of one extra."""
    for requirement in map(Requirement, metadata.requires(name) or ()):
        dependency = requirement.name
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            try:
                metadata.distribution(dependency)
            except metadata.PackageNotFoundError:  # a requirement for another platform or Python
                continue
            yield dependency
            yield from distributions(dependency)


def new_environment(wheel: Path, folder: Path, extra: str = "") -> Path:
    """Return the `bin` folder of an environment with the wheel and links to its requirements."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in set(distributions(extra=extra)):
        for file in metadata.distribution(name).files or ():
            link = site / file
            if ".." not in file.parts and "__pycache__" not in file.parts:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    run(*pip, "check")
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_environment(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def cpu_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_environment(wheel, tmp_path_factory.mktemp("cpu"), "cpu")


def test_wheel_has_every_file_of_the_package(wheel: Path):
    files = {f for f in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in f}
    assert files == package_files(ROOT)
    # The list is not empty by mistake: one file of each kind that is read at run time.
    for path in (
        "plugins/nms_keep/nms_keep.cu",
        "plugins/runtime/boxes.cuh",
        "protos/inference/open_inference.binpb",
        "protos/maskrcnn/v1/detector.proto",
        "serving/http/page/index.html",
        "training/presets/quick.yaml",
        "py.typed",
    ):
        assert f"maskrcnn_trt/{path}" in files


def test_base_install_has_no_training_stack(environment: Path):
    absent = ("torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "pycocotools")
    script = f"from importlib.util import find_spec; print([find_spec(n) for n in {absent}])"
    assert run(environment / "python", "-c", script).stdout.strip() == str([None] * len(absent))


def test_base_install_imports_serving_and_shows_help(environment: Path):
    run(environment / "python", "-c", "import maskrcnn_trt.serving.client")
    assert "quickstart" in run(environment / "maskrcnn", "--help").stdout
    script = "from click.testing import CliRunner; from maskrcnn_trt.cli import cli\n"
    for command in ("serve", "client", "predict", "train", "export", "bench"):
        script += f"assert not CliRunner().invoke(cli, ['{command}', '--help']).exception\n"
    run(environment / "python", "-c", script)


def test_base_install_names_the_missing_extra(environment: Path, tiny_checkpoint: Path):
    result = run(environment / "maskrcnn", "export", tiny_checkpoint, "-o", "/nowhere", code=1)
    assert 'pip install "maskrcnn-trt[train]"' in result.stderr


def test_base_install_names_the_extras_of_backends(environment: Path, bundle: Path):
    for options in ([], ["--doctor"]):
        result = run(environment / "maskrcnn", "serve", bundle, "--port", "0", *options, code=1)
        text = " ".join((result.stdout + result.stderr).split())
        for extra in ("cpu", "gpu"):
            assert f'"maskrcnn-trt[{extra}]"' in text


# With an index, because not all of these packages are here to be linked; nothing is downloaded.
@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        ("http,ray,tracing,torch", set()),
        ("cpu", {"onnxruntime"}),
        ("train,cpu", {"onnxruntime"}),
        ("gpu", {"onnxruntime-gpu", "nvidia-cudnn-cu13", "nvidia-cublas"}),
        ("train,gpu", {"onnxruntime-gpu", "nvidia-cudnn-cu13", "nvidia-cublas", "torch"}),
    ],
)
def test_extras_install_at_most_one_onnxruntime(
    wheel: Path, extras: str, expected: set[str], tmp_path: Path
):
    uv = Path(sys.executable).with_name("uv")
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "new")
    # Constrained as in the Dockerfile, so that no new release breaks the test.
    lock = re.sub(r" *\\$|^ *--hash=.*", "", (ROOT / "requirements.lock").read_text(), flags=re.M)
    (tmp_path / "constraints.txt").write_text(lock)
    command = [uv, "pip", "install", "--dry-run", "--python", tmp_path / "new"]
    command += ["--constraint", tmp_path / "constraints.txt", f"maskrcnn-trt[{extras}] @ {wheel}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if re.search(r"dns error|Connect|tls|timed out", result.stderr):
        pytest.skip("needs a package index")
    assert result.returncode == 0, result.stderr
    planned = set(re.findall(r"^ \+ ([\w-]+)==", result.stderr, re.M))
    assert expected <= planned
    assert {name for name in planned if name.startswith("onnxruntime")} == {
        name for name in expected if name.startswith("onnxruntime")
    }


def test_cpu_install_serves_a_bundle_to_its_client(
    cpu_environment: Path, bundle: Path, tmp_path: Path
):
    image = tmp_path / "image.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (120, 180, 3), np.uint8)
    Image.fromarray(noise).save(image)
    maskrcnn = cpu_environment / "maskrcnn"
    options = (image, "--score-threshold", "0", "-o")
    run(maskrcnn, "predict", bundle, *options, tmp_path / "predicted")
    server = subprocess.Popen(
        [maskrcnn, "serve", bundle, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    with server:
        address = re.search(r"\S+:\d+", server.stdout.readline())[0]
        run(maskrcnn, "client", address, *options, tmp_path / "from_server")
        server.terminate()
    assert server.returncode == 0
    predicted, from_server = (
        json.loads((tmp_path / folder / "detections.json").read_text())
        for folder in ("predicted", "from_server")
    )
    assert from_server
    assert from_server == predicted
