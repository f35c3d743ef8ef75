"""Tables of ONNX's operators: those that compute nothing, and those of functions of one element."""

from onnx import TensorProto

SAME = frozenset({"Identity", "Cast", "CastLike"})  # the same elements, perhaps of another type
REPEATING = frozenset({"Expand", "Tile"})
RESHAPING = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"}) | REPEATING
LAYOUT = SAME | (RESHAPING - REPEATING) | {"Transpose"}  # all elements, once each
MOVING = LAYOUT | REPEATING | {"Slice", "Split", "Gather", "Concat"}

# cnorm's name of a function -> the operator, and its name among the activations of LSTM, GRU and RNN if it is one
FUNCTIONS = {
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "elu": "Elu",
    "leaky_relu": "LeakyRelu",
    "softplus": "Softplus",
    "hard_sigmoid": "HardSigmoid",
    "exp": "Exp",
    "sqrt": "Sqrt",
    "abs": "Abs",
    "sin": "Sin",
    "cos": "Cos",
}
ATTRIBUTES = {"slope": "alpha"}  # cnorm's names of their parameters, where they differ

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})  # of norms
