"""Small ONNX files, written node by node."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def saved(path, nodes, inputs, outputs, weights, opset=17, ids=()):
    """Write a graph; inputs and outputs by name with their shapes. `ids`: inputs that are int64."""

    def infos(shapes):
        kinds = {name: TensorProto.INT64 if name in ids else TensorProto.FLOAT for name in shapes}
        return [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()]

    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", infos(inputs), infos(outputs), stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def normal(rng, *shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def imported(path, check=True, **options):
    """`onnx_export.loader.imported` in this process, without a child: with the file, to run beside the model."""
    from onnx_export import model_io
    from onnx_export.errors import NotImported
    from onnx_export.importer import import_model

    given = {"inputs": {}, "states": {}, "dims": {}, "frames": ()} | options
    try:
        return import_model(model_io.load(path, external_data=True), check=check, **given)
    except NotImported as error:
        raise NotImported(f"{path}: {error.summary}", error.reasons) from None


def kinds(found):
    """The kinds of the layers that were found."""
    return [layer.kind for layer in found.model.layers]


def checked(found, rng, frames=30):
    """The layers' kinds, if the file is proven and the model computes what it does over some frames."""
    assert found.report.ok
    x = rng.standard_normal((frames, found.model.input_size)).astype(np.float32)
    assert found.model.check(x, found.file.run(x)).ok
    return kinds(found)
