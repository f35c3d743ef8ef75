"""Export cnorm models to ONNX, prove the export equal, and validate the layer norms of any ONNX file."""
