"""onnxruntime, one thread: `run`, and IO binding, which is faster because arrays are bound once and not copied."""

from cnorm_bench.contenders.timing import Contender, empty_like
from cnorm_bench.runners import OrtBinding, OrtRun, ort_session

LABEL = "onnxruntime"
PACKAGES = ("onnx", "onnxruntime")


def layer_norm(x, weight, bias):
    return _one_node("LayerNormalization", {"x": x, "weight": weight, "bias": bias}, axis=-1, stash_type=1)


def rms_norm(x, weight):
    return _one_node("RMSNormalization", {"x": x, "weight": weight}, opset=23, ir_version=11, axis=-1, stash_type=1)


def add_layer_norm(x, residual, weight, bias):
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    return _one_node("SkipLayerNormalization", inputs, ["y", "", "", "total"], domain="com.microsoft")


def _one_node(kind, inputs, outputs=("y",), *, opset=17, ir_version=8, domain="", **attributes):
    """`run` and IO binding of a model of one node: arrays [rows, n] are its inputs, weight and bias initialisers."""
    from onnx import helper, numpy_helper

    x = inputs["x"]
    if x.dtype.name == "bfloat16":  # onnxruntime has no such kernels on CPUs
        return []
    node = helper.make_node(kind, list(inputs), list(outputs), domain=domain, epsilon=1e-5, **attributes)
    made = {name: empty_like(x) for name in outputs if name}
    feed = {name: array for name, array in inputs.items() if array.ndim == 2}
    tensor = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        kind,
        [helper.make_tensor_value_info(name, tensor, x.shape) for name in feed],
        [helper.make_tensor_value_info(name, tensor, x.shape) for name in made],
        [numpy_helper.from_array(array, name) for name, array in inputs.items() if name not in feed],
    )
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx_model = helper.make_model(graph, opset_imports=domains, ir_version=ir_version)
    session = ort_session(onnx_model.SerializeToString())
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, array in made.items():
        binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    bound = {"run_with_iobinding": session.run_with_iobinding, "binding": binding, "feed": feed}
    plain = {"run": session.run, "outputs": list(made), "feed": feed}
    return [
        Contender("onnxruntime, IO binding", "run_with_iobinding(binding)", bound, lambda _: tuple(made.values())),
        Contender("onnxruntime, run()", "run(outputs, feed)", plain, tuple),
    ]


def steps(model, onnx_model):
    return [OrtRun(onnx_model), OrtBinding(onnx_model)]


def rounded_steps(model):
    """Models that onnxruntime's tool quantises, where it can, and cnorm's int8 model exported to standard operators.

    The tool makes DynamicQuantizeLSTM of the operator LSTM, and MatMulInteger of products; it has nothing for GRU.
    """
    import onnx_export

    modes = {"per tensor": {}, "per channel": {"per_channel": True}, "reduced range": {"reduce_range": True}}
    plain = not model.layers[0].spec.normalises
    exported = onnx_export.export(model, form="step", native_ops=plain, portable=True)
    made = [(mode, _quantised(exported, options)) for mode, options in modes.items()]
    found = [OrtBinding(file, f"onnxruntime, int8 {mode}") for mode, file in made if file is not None]
    integers = onnx_export.export(model.with_weights("int8"), form="step", portable=True)
    return [*found, OrtBinding(integers.SerializeToString(), "onnxruntime, cnorm's int8 graph")]


def _quantised(onnx_model, options):
    """The bytes of the model that `quantize_dynamic` makes; None if it quantises nothing."""
    import logging
    import tempfile
    from pathlib import Path

    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        onnx.save(onnx_model, before)
        logging.disable(logging.WARNING)  # it advises to run its preprocessing, which changes nothing here
        try:
            quantize_dynamic(before, after, weight_type=QuantType.QInt8, **options)
        finally:
            logging.disable(logging.NOTSET)
        operators = {node.op_type for node in onnx.load(after).graph.node}
        return after.read_bytes() if operators & {"DynamicQuantizeLSTM", "MatMulInteger"} else None
