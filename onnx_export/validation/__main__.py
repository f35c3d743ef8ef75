from onnx_export.validation.command import validate

validate(prog_name="cnorm validate")
