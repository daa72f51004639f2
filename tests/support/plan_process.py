"""Run a TensorRT plan without this package: `plan_process.py PLAN INPUTS OUTPUT`.

INPUTS is a file of `torch.save` with a dict of input tensors by name. The engine's only output is
saved to OUTPUT.
"""

import sys
from pathlib import Path

import tensorrt as trt
import torch


def main(plan: str, inputs: str, output: str) -> None:
    engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(
        Path(plan).read_bytes()
    )
    context = engine.create_execution_context()
    tensors = {name: tensor.cuda() for name, tensor in torch.load(inputs).items()}
    for name, tensor in tensors.items():
        context.set_input_shape(name, tuple(tensor.shape))
    types = {trt.float32: torch.float32, trt.float16: torch.float16, trt.int32: torch.int32}
    dtype = types[engine.get_tensor_dtype("output")]
    tensors["output"] = torch.empty(
        tuple(context.get_tensor_shape("output")), dtype=dtype, device="cuda"
    )
    for name, tensor in tensors.items():
        context.set_tensor_address(name, tensor.data_ptr())
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not [name for name in sys.modules if name.split(".")[0] == "maskrcnn_trt"]
    torch.save(tensors["output"].cpu(), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
