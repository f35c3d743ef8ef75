"""Small ONNX files, written node by node."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def saved(path, nodes, inputs, outputs, weights, opset=17):
    """Write a graph; inputs and outputs by name with their shapes."""

    def infos(shapes):
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]

    stored = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", infos(inputs), infos(outputs), stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def normal(rng, *shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
