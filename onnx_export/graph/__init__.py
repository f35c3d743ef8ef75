"""What is known of ONNX nodes one by one: the sizes of their results."""
