"""Requests of the Open Inference Protocol as messages."""

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference


def infer_request(model: str, *images: bytes) -> inference.ModelInferRequest:
    tensor = inference.ModelInferRequest.InferInputTensor(
        name="images",
        datatype="BYTES",
        shape=[len(images)],
        contents=inference.InferTensorContents(bytes_contents=images),
    )
    return inference.ModelInferRequest(model_name=model, inputs=[tensor])
