"""Write keras_recurrent.tar.xz: Keras' LSTM, GRU and SimpleRNN by tf2onnx. Needs tensorflow-cpu, keras and tf2onnx.

    PYTHONPATH=tests/support python -P -m corpus.make_keras_recurrent

A file is named KIND_FORM@tf2onnx.onnx; KIND_FORM@tf2onnx.npz has its inputs and Keras' outputs.
"""

import io
import itertools
import os

import numpy as np
from corpus.archive import write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
INPUTS, UNITS, STEPS, ROWS = 3, 4, 5, 2
FORMS = {
    "plain": {},
    "sequences": {"return_sequences": True},
    "both": {"return_sequences": True},
    "two": {},
    "backwards": {"go_backwards": True, "return_sequences": True},
    "states": {"return_state": True, "return_sequences": True},
    "no_bias": {"use_bias": False},
    "relu": {"activation": "relu"},
    "unrolled": {"unroll": True},
}
GATED = {
    "hard_sigmoid": {"recurrent_activation": "hard_sigmoid"},
    "linear": {"activation": "linear", "return_sequences": True},
}
GRU = {
    "reset_before": {"reset_after": False},
    "reset_before_sequences": {"reset_after": False, "return_sequences": True},
}
KINDS = {"LSTM": FORMS | GATED, "GRU": FORMS | GATED | GRU, "SimpleRNN": FORMS}


def model_of(keras, kind, name, arguments):
    """A Keras model with random weights, also random biases."""
    layer, x = getattr(keras.layers, kind), keras.layers.Input((STEPS, INPUTS))
    if name == "both":
        y = keras.layers.Bidirectional(layer(UNITS, **arguments))(x)
    elif name == "two":
        y = layer(UNITS)(layer(UNITS, return_sequences=True)(x))
    else:
        y = layer(UNITS, **arguments)(x)
    model = keras.Model(x, y)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(0, 0.5, weight.shape))
    return model


def files():
    """(name, bytes) of every file."""
    import keras
    import tensorflow as tf
    import tf2onnx

    signature = [tf.TensorSpec((ROWS, STEPS, INPUTS), tf.float32, name="x")]
    for kind, name in itertools.chain.from_iterable([(k, n) for n in forms] for k, forms in KINDS.items()):
        model = model_of(keras, kind, name, KINDS[kind][name])
        function = tf.function(lambda x, model=model: model(x), input_signature=signature)
        try:
            exported, _ = tf2onnx.convert.from_function(function, signature, opset=17)
        except Exception as error:
            print(f"{kind}_{name}: not exported: {type(error).__name__}: {str(error)[:80]}")
            continue
        x = np.random.default_rng(1).normal(size=(ROWS, STEPS, INPUTS)).astype(np.float32)
        results = tf.nest.flatten(model(x))
        arrays = dict(zip([each.name for each in exported.graph.output], results, strict=True))
        data = io.BytesIO()
        np.savez(data, x=x, **{each: value.numpy() for each, value in arrays.items()})
        yield f"{kind}_{name}@tf2onnx.onnx", exported.SerializeToString()
        yield f"{kind}_{name}@tf2onnx.npz", data.getvalue()


if __name__ == "__main__":
    write("keras_recurrent", files())
