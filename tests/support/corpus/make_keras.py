"""Write keras.tar.xz: norms of Keras and TensorFlow, by tf2onnx. Needs tensorflow-cpu, keras and tf2onnx.

    PYTHONPATH=tests/support python -P -m corpus.make_keras

A file is named FORM@tf2onnx-OPSET.onnx. FORMS says what the validator must find in it: the formula of each norm, "~"
before a near miss.
"""

import os

from corpus.archive import write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
N = 16
OPSETS = (13, 15, 17, 18)
FORMS = {
    "layer": ["layer"],
    "layer_of_rows": ["layer"],
    "layer_of_images": ["layer"],
    "layer_two_axes": ["layer"],
    "layer_first_axis": ["layer"],
    "layer_no_scale": ["layer"],
    "layer_no_affine": ["layer"],
    "layer_large_eps": ["layer"],
    "layer_half": ["layer"],
    "rms": ["rms"],
    "unit": [],
    "group": ["layer"],
    "moments": ["layer"],
    "batch_normalization": ["layer"],
    "ops_var": ["layer"],
    "ops_std": ["~layer"],
    "reduce_by_hand": ["layer"],
    "rms_by_hand": ["rms"],
    "one_pass": ["layer"],
    "transformer": ["layer", "layer"],
    "pre_norm": ["layer", "layer", "layer"],
    "recurrent": ["layer"],
}


def forms():
    """Keras models by name, in the order of FORMS, with a spread in their gains."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers, ops

    def model(layer, shape=(5, N)):
        x = layers.Input(shape)
        built = keras.Model(x, layer(x))
        rng = np.random.default_rng(0)
        for weight in built.weights:
            if weight.path.endswith(("gamma", "scale")):
                weight.assign(rng.uniform(0.5, 1.5, weight.shape))
            elif weight.path.endswith("beta"):
                weight.assign(rng.uniform(-1, 1, weight.shape))
        return built

    def by_tf(function):
        return model(layers.Lambda(function, output_shape=(5, N)))

    def moments(x):
        mean, var = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(var + 1e-5)

    def batch_normalization(x):
        mean, var = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, var, tf.linspace(-1.0, 1.0, N), tf.linspace(0.5, 1.5, N), 1e-3)

    def by_hand(x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        return (x - mean) / tf.sqrt(tf.reduce_mean(tf.square(x - mean), -1, keepdims=True) + 1e-6)

    def rms(x):
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6) * tf.linspace(0.5, 1.5, N)

    def one_pass(x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        second = tf.reduce_mean(x * x, -1, keepdims=True)
        return (x - mean) / tf.sqrt(second - mean * mean + 1e-5)

    def ops_var(x):
        return (x - ops.mean(x, -1, keepdims=True)) / ops.sqrt(ops.var(x, -1, keepdims=True) + 1e-5)

    def ops_std(x):
        return (x - ops.mean(x, -1, keepdims=True)) / (ops.std(x, -1, keepdims=True) + 1e-5)

    def attention(x):
        return layers.MultiHeadAttention(2, N // 2)(x, x)

    def transformer(x):
        x = layers.LayerNormalization(epsilon=1e-6)(x + attention(x))
        return layers.LayerNormalization(epsilon=1e-6)(x + layers.Dense(N)(layers.Dense(N, "relu")(x)))

    def pre_norm(x):
        x = x + attention(layers.LayerNormalization()(x))
        x = x + layers.Dense(N)(layers.Dense(N, "relu")(layers.LayerNormalization()(x)))
        return layers.LayerNormalization()(x)

    class Cell(layers.Layer):
        """A simple recurrent cell that normalises its sum."""

        def __init__(self):
            super().__init__()
            self.state_size = self.output_size = N
            self.inner, self.outer, self.norm = layers.Dense(N), layers.Dense(N), layers.LayerNormalization()

        def build(self, shape):
            self.inner.build(shape)
            self.outer.build((shape[0], N))
            self.norm.build((shape[0], N))
            super().build(shape)

        def call(self, x, states):
            h = ops.tanh(self.norm(self.inner(x) + self.outer(states[0])))
            return h, [h]

    half = layers.LayerNormalization(dtype="float16")
    made = [
        model(layers.LayerNormalization()),
        model(layers.LayerNormalization(), (N,)),
        model(layers.LayerNormalization(), (3, 4, N)),
        model(layers.LayerNormalization(axis=[1, 2])),
        model(layers.LayerNormalization(axis=1)),
        model(layers.LayerNormalization(scale=False)),
        model(layers.LayerNormalization(scale=False, center=False)),
        model(layers.LayerNormalization(epsilon=0.005)),
        model(lambda x: ops.cast(half(ops.cast(x, "float16")), "float32")),
        model(layers.RMSNormalization()),
        model(layers.UnitNormalization()),
        model(layers.GroupNormalization(4), (6, 8)),
        by_tf(moments),
        by_tf(batch_normalization),
        by_tf(ops_var),
        by_tf(ops_std),
        by_tf(by_hand),
        by_tf(rms),
        by_tf(one_pass),
        model(transformer),
        model(pre_norm),
        model(layers.RNN(Cell())),
    ]
    return dict(zip(FORMS, made, strict=True))


def files():
    """(name, bytes) of every file."""
    import tensorflow as tf
    import tf2onnx

    for name, model in forms().items():
        for opset in OPSETS:
            signature = [tf.TensorSpec((2, *model.inputs[0].shape[1:]), tf.float32, name="x")]
            function = tf.function(model, input_signature=signature)
            try:
                exported, _ = tf2onnx.convert.from_function(function, signature, opset=opset)
            except Exception as error:
                print(f"{name}: not exported: {type(error).__name__}: {str(error)[:80]}")
                continue
            yield f"{name}@tf2onnx-{opset}.onnx", exported.SerializeToString()


if __name__ == "__main__":
    write("keras", files())
