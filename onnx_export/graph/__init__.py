"""Pieces of ONNX graphs: what the exporter, the importer and the validator share."""
