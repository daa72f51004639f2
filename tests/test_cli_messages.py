"""Exact messages of mistyped and invalid command lines. Other tests assert key facts only."""

from pathlib import Path

import pytest
from command_line import run_main

COMMANDS = (
    "quickstart, data, config, weights, train, eval, export, engine, serve, predict, client, "
    "health, doctor, bench, kernels"
)
PRESETS = (
    "1x, 1x-1gpu, bs32, bs64, bs96, c4, c4-r101, c5, c5-r101, gn, gn-scratch, quick, "
    "quick-r50-fpn, r101, tf2"
)
ADDRESS = (
    "give host:port, as in localhost:8500 or [::1]:8500, or a gRPC target with a scheme, as in "
    "dns:///host:8500 or unix:/path"
)
SOLVER_KEYS = (
    "optimizer, images_per_batch, accumulate, scale_from_batch, base_lr, bias_lr_factor, momentum, "
    "weight_decay, max_iterations, epochs, schedule, steps, gamma, warmup_iterations, "
    "warmup_factor, warmup_method, freeze_backbone_after_epoch, clip_gradient_norm, ema_decay"
)

# Name of the parameter that is /dev/null/x, a path below a file, by the command line before it.
OUTPUTS = {
    "eval b --json": "'--json'",
    "eval b --report": "'--report'",
    "eval b -o": "'-o' / '--output'",
    "bench bulk b --json": "'--json'",
    "bench infer b --output": "'--output'",
    "export no-such.pth -o": "'-o' / '--output'",
    "data download coco2017": "'DIR'",
    "data merge": "'OUT'",
    "weights convert no-such.pkl -o": "'-o' / '--output'",
}

# Exit code 2, by command line.
USAGE_ERRORS = {
    "trian": f"'maskrcnn' has no command 'trian' (did you mean train?); choose from {COMMANDS}",
    "bench sevre": (
        "'maskrcnn bench' has no command 'sevre' (did you mean serve?); choose from bulk, "
        "infer, kernels, serve, train"
    ),
    "data synthtic": (
        "'maskrcnn data' has no command 'synthtic' (did you mean synthetic?); choose from "
        "convert, download, extract, filter, inspect, merge, split, synthetic, verify"
    ),
    "serve": "Missing argument 'MODEL...'; usage: maskrcnn serve [OPTIONS] MODEL...",
    "serve b --port http": (
        "Invalid value for '--port' (env var: 'MASKRCNN_PORT'): 'http' is not a valid integer."
    ),
    "serve b --port": "Option '--port' requires an argument.",
    "serve b --max-batch 0": (
        "--max-batch is 0; allowed: whole number, >= 1; usage: maskrcnn serve [OPTIONS] MODEL..."
    ),
    "serve b --max-delay-ms nan": (
        "--max-delay-ms is nan; allowed: number, >= 0, <= 86400000; usage: maskrcnn serve "
        "[OPTIONS] MODEL..."
    ),
    "serve b --config no-such.yaml": (
        "Invalid value for '--config' (env var: 'MASKRCNN_CONFIG'): File 'no-such.yaml' does "
        "not exist."
    ),
    "serve b --tls-key key.pem": (
        "tls_certificate and tls_key must be given together; usage: maskrcnn serve "
        "[OPTIONS] MODEL..."
    ),
    "export no-such.pth": (
        "Missing option '-o' / '--output'; usage: maskrcnn export [OPTIONS] CHECKPOINT"
    ),
    "export no-such.pth -o b --shape 800": (
        "Invalid value for '--shape': '800' is not of the form HEIGHTxWIDTH, as in 800x1344"
    ),
    "export no-such.pth -o b --shape 100x160": (
        "Invalid value for '--shape': 100x160 must be a multiple of 32 pixels on both sides"
    ),
    "export no-such.pth -o b --precision int4": (
        "Invalid value for '--precision': 'int4' is not one of 'fp32', 'tf32', 'fp16', 'bf16', "
        "'int8', 'fp8'."
    ),
    "export no-such.pth -o b --precision int8 --calibration none": (
        "Invalid value for --calibration: none does not exist; give an image or a folder of images"
    ),
    "export no-such.pth -o b --batch 8": (
        "--batch has no effect without --engine tensorrt or --engine tensorrt-rtx; usage: "
        "maskrcnn export [OPTIONS] CHECKPOINT"
    ),
    "export no-such.pth -o b --engine tensorrt --build-log b/log": (
        "--build-log b/log is inside the bundle, which is replaced as a whole; choose a file "
        "outside of it; usage: maskrcnn export [OPTIONS] CHECKPOINT"
    ),
    "export no-such.pth -o b --verify no-such-folder": (
        "Invalid value for --verify: no-such-folder does not exist; give an image or a folder of "
        "images"
    ),
    "predict no-such-bundle images": (
        "Invalid value for 'IMAGES...': Path 'images' does not exist."
    ),
    "predict no-such-bundle images --score-threshold 2": (
        "Invalid value for '--score-threshold': 2.0 is not in the range 0<=x<=1."
    ),
    "client localhost images": (
        f"Invalid value for 'HOST': 'localhost' is not a server address; {ADDRESS}"
    ),
    "data synthetic d --size 192": (
        "Invalid value for '--size': '192' is not WIDTHxHEIGHT in pixels, from 64 to 4096 "
        "each, such as 320x256"
    ),
    "data synthetic d --train -1": "Invalid value for '--train': -1 is not in the range x>=1.",
    "data download coco2018 d": (
        "Invalid value for '{coco2014|coco2017}': 'coco2018' is not one of 'coco2014', 'coco2017'."
    ),
    "data download coco2017 d --timeout 1e10": (
        "Invalid value for '--timeout': 10000000000.0 is not in the range 0<x<=86400."
    ),
    "bench infer": (
        "Missing argument 'MODELS...'; usage: maskrcnn bench infer [OPTIONS] MODELS..."
    ),
    "bench serve no-such-bundle": (
        "no-such-bundle is not a bundle, and 'no-such-bundle' is not a server address; "
        f"{ADDRESS}; usage: maskrcnn bench serve [OPTIONS] SERVER [-- OPTIONS]..."
    ),
    "bench serve b --max-batch 4": (
        "--max-batch is an option of `maskrcnn serve`; write it after --; usage: maskrcnn bench "
        "serve [OPTIONS] SERVER [-- OPTIONS]..."
    ),
    "bench serve b --rate 1e7": (
        "Invalid value for '--rate': 10000000.0 is not in the range 0<x<=100000."
    ),
    "bench serve b --load 1e7": (
        "Invalid value for '--load': 10000000.0 is not in the range 0<x<=100."
    ),
    "bench kernels --no-such": (
        "'maskrcnn bench kernels' has no option '--no-such'; choose from --kernel, --json, "
        "--output, --help"
    ),
    "kernels build --compute-capability 89": (
        "Invalid value for '--compute-capability': '89' is not a compute capability such as 8.9"
    ),
    "train finetun .": "'finetun' is unknown; did you mean `train finetune`?",
    "quickstart --images 1": "Invalid value for '--images': 1 is not in the range x>=8.",
    **{
        f"{line} /dev/null/x": (
            f"Invalid value for {parameter}: /dev/null/x: no file can be created in /dev/null (Not "
            "a directory); choose another path"
        )
        for line, parameter in OUTPUTS.items()
    },
}
# Exit code 1, by command line.
FAILURES = {
    "export no-such.pth -o b --precision int8": (
        "int8 needs calibration images to measure the value ranges of tensors; run maskrcnn export "
        "with --calibration IMAGES (in Python, calibration)"
    ),
    "serve no-such-bundle --port 0": (
        "{cwd}/no-such-bundle does not exist; make a bundle with "
        "`maskrcnn export CHECKPOINT -o BUNDLE`"
    ),
    "train no-such-preset": (
        f"'no-such-preset' is neither a file nor a preset; presets: {PRESETS}"
    ),
    "train .": (
        "'.' is a folder, neither a file nor a preset; to train on the data set in it, run "
        "`maskrcnn train finetune .`"
    ),
    "train quick solver.base_rl=0.1": (
        "quick: unknown key solver.base_rl (did you mean solver.base_lr?); allowed here: "
        f"{SOLVER_KEYS}"
    ),
    "train quick solver.base_lr=fast": "quick: solver.base_lr is 'fast'; allowed: number, > 0",
    "train quick solver": "override 'solver' is not of the form key.path=value",
    "export no-such.pth -o b": (
        "no-such.pth does not exist; give a .pth or .pkl file of weights, or a name of "
        "`maskrcnn weights list`"
    ),
    "export torchvision:maskrcnn_resnet50 -o b": (
        "torchvision has no model 'maskrcnn_resnet50' (did you mean "
        "torchvision:maskrcnn_resnet50_fpn?); `maskrcnn weights list` lists the models"
    ),
    "weights convert no-such.pkl -o w.pth": (
        "no-such.pkl does not exist; give a .pth or .pkl file of weights, or a name of "
        "`maskrcnn weights list`"
    ),
}


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        *((line, 2, message) for line, message in USAGE_ERRORS.items()),
        *((line, 1, message) for line, message in FAILURES.items()),
    ],
    ids=lambda value: value if value in USAGE_ERRORS or value in FAILURES else "",
)
def test_message(
    line: str,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    message = message.replace("{cwd}", str(tmp_path))
    assert run_main(monkeypatch, capsys, *line.split()) == (code, "", f"Error: {message}\n")
