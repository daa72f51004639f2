import subprocess
import sys
from pathlib import Path

from tensorrt_stubs import load_tensorrt, missing_names, stubbed_environment


def test_the_stand_ins_give_the_real_bindings() -> None:
    trt = load_tensorrt()
    assert int(trt.__version__.split(".")[0]) >= 10
    assert "TF32" in trt.BuilderFlag.__members__
    assert callable(sys.modules["tensorrt.plugin"].register)


def test_they_do_in_a_fresh_process_beside_tensorrt_rtx() -> None:
    load_tensorrt()
    code = "import tensorrt.plugin, tensorrt_rtx; print(tensorrt.plugin.register.__module__)"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=stubbed_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip().endswith("plugin._lib")


def test_names_that_the_bindings_lack_are_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "flags = (trt.BuilderFlag.TF32, trt.BuilderFlag.FP8X)\nother = trt.Bulider()\n"
    )
    assert missing_names(source, "trt", load_tensorrt()) == ["trt.BuilderFlag.FP8X", "trt.Bulider"]
