"""Simple recurrent cells of known frameworks; docs/cells.md has their equations."""

from cnorm.cells.presets.parts import PAPER, affine
from cnorm.cells.specs import CellSpec

TORCH = (
    ("weight_ih_l{layer}{reverse}", "H I", "weight_x"),
    ("weight_hh_l{layer}{reverse}", "H H", "weight_h"),
    ("bias_ih_l{layer}{reverse}", "H", "bias_x?"),
    ("bias_hh_l{layer}{reverse}", "H", "bias_h?"),
)

CELLS = (
    CellSpec(
        "RNN",
        "ba2016",
        f"{PAPER}, Eq. 4, tanh",
        "a",
        (("weight_x", "H I", "weight_x"), ("weight_h", "H H", "weight_h"), *affine(("gain", "bias", ""), size="H")),
        scope="sum",
        eps=1e-5,
    ),
    CellSpec(
        "RNN",
        "ba2016_relu",
        f"{PAPER}, Eq. 4, relu",
        "a",
        (("weight_x", "H I", "weight_x"), ("weight_h", "H H", "weight_h"), *affine(("gain", "bias", ""), size="H")),
        scope="sum",
        activation="relu",
        eps=1e-5,
    ),
    CellSpec(
        "RNN",
        "tfa",
        "github.com/tensorflow/addons, tensorflow_addons/rnn/layer_norm_simple_rnn_cell.py",
        "a",
        (
            ("kernel", "I H", "weight_x.T"),
            ("recurrent_kernel", "H H", "weight_h.T"),
            ("bias", "H", "bias?"),
            ("gamma", "H", "gain"),
        ),
        scope="sum",
        eps=1e-5,
    ),
    CellSpec(
        "RNN",
        "kann",
        "github.com/attractivechaos/kann, kann.c, kann_layer_rnn with KANN_RNN_NORM",
        "a",
        (
            ("w", "H I", "weight_x"),
            ("u", "H H", "weight_h"),
            *affine(("alpha_w", "beta_w", "x"), ("alpha_u", "beta_u", "h"), size="H"),
            ("b", "H", "bias"),
        ),
        scope="split",
        eps=0.0,
    ),
    CellSpec("RNN", "torch", "pytorch.org, torch.nn.RNN and RNNCell with nonlinearity='tanh'", "a", TORCH),
    CellSpec(
        "RNN",
        "torch_relu",
        "pytorch.org, torch.nn.RNN and RNNCell with nonlinearity='relu'",
        "a",
        TORCH,
        activation="relu",
    ),
    CellSpec(
        "RNN",
        "keras",
        "keras.io, keras.layers.SimpleRNN",
        "a",
        (("kernel", "I H", "weight_x.T"), ("recurrent_kernel", "H H", "weight_h.T"), ("bias", "H", "bias?")),
    ),
    CellSpec(
        "RNN",
        "onnx",
        "onnx.ai, operator RNN",
        "a",
        (("W", "1 H I", "weight_x"), ("R", "1 H H", "weight_h"), ("B", "1 2H", "bias_x bias_h?")),
    ),
)
