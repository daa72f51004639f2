"""Export to ONNX: graph, function bodies and numeric types."""
