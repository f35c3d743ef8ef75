"""Export of cnorm models to ONNX, parity checks, and a validator for anybody's ONNX layer norms."""
