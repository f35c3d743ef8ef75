"""Write paddle.tar.xz: norms of PaddlePaddle, by paddle2onnx. Needs paddlepaddle and paddle2onnx.

    PYTHONPATH=tests/support python -P -m corpus.make_paddle

A file is named FORM@paddle2onnx-OPSET.onnx. FORMS says what the validator must find in it: the formula of each norm,
"~" before a near miss.
"""

import tempfile
from pathlib import Path

from corpus.archive import write

N = 16
OPSETS = (11, 13, 16, 17)
FORMS = {
    "layer": ["layer"],
    "layer_no_affine": ["layer"],
    "layer_large_eps": ["layer"],
    "layer_two_axes": ["layer"],
    "by_hand": ["layer"],
    "var_rsqrt": ["layer"],
    "unbiased": ["~layer"],
    "rms": ["rms"],
    "one_pass": ["layer"],
    "first_axis": ["layer"],
    "instance": ["instance"],
    "two_layers": ["layer", "layer"],
    "transformer": ["layer", "layer"],
    "softmax": [],
}


def forms():
    """Layers by name, in the order of FORMS."""
    import paddle
    from paddle import nn

    paddle.seed(0)

    class Form(nn.Layer):
        """A function of x, a gain and a bias."""

        def __init__(self, function):
            super().__init__()
            self.function = function
            self.register_buffer("gain", paddle.linspace(0.5, 1.5, N))
            self.register_buffer("bias", paddle.linspace(-1, 1, N))

        def forward(self, x):
            return self.function(x, self.gain, self.bias)

    def spread(layer):
        for name, value in layer.named_parameters():
            if value.ndim == 1:
                value.set_value(paddle.linspace(0.5, 1.5, value.shape[0]) - ("bias" in name))
        return layer

    def mean(x, axis=-1):
        return x.mean(axis, keepdim=True)

    def by_hand(x, axis=-1):
        d = x - mean(x, axis)
        return d / paddle.sqrt(mean(d * d, axis) + 1e-5)

    encoder = nn.TransformerEncoderLayer(N, 2, 2 * N, dropout=0.0, activation="relu")
    made = [
        spread(nn.LayerNorm(N)),
        nn.LayerNorm(N, weight_attr=False, bias_attr=False),
        spread(nn.LayerNorm(N, epsilon=1e-3)),
        nn.LayerNorm([5, N]),
        Form(lambda x, gain, bias: by_hand(x) * gain + bias),
        Form(lambda x, gain, bias: (x - mean(x)) * paddle.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * gain),
        Form(lambda x, gain, bias: (x - mean(x)) * paddle.rsqrt(x.var(-1, keepdim=True) + 1e-5) * gain),
        Form(lambda x, gain, bias: x * paddle.rsqrt(mean(x * x) + 1e-6) * gain),
        Form(lambda x, gain, bias: (x - mean(x)) / paddle.sqrt(mean(x * x) - mean(x) ** 2 + 1e-5)),
        Form(lambda x, gain, bias: by_hand(x, 1)),
        spread(nn.InstanceNorm1D(5)),
        nn.Sequential(spread(nn.LayerNorm(N)), nn.ReLU(), spread(nn.LayerNorm(N))),
        spread(encoder),
        nn.Softmax(),
    ]
    return dict(zip(FORMS, made, strict=True))


def files():
    """(name, bytes) of every file."""
    import paddle

    for name, layer in forms().items():
        layer.eval()
        for opset in OPSETS:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "model"
                spec = [paddle.static.InputSpec([2, 5, N], "float32", "x")]
                try:
                    paddle.onnx.export(layer, str(target), input_spec=spec, opset_version=opset)
                    data = target.with_suffix(".onnx").read_bytes()
                except Exception as error:
                    print(f"{name} {opset}: not exported: {type(error).__name__}: {str(error)[:100]}")
                    continue
            yield f"{name}@paddle2onnx-{opset}.onnx", data


if __name__ == "__main__":
    write("paddle", files())
