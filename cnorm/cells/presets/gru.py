"""Gated recurrent units of known frameworks; docs/cells.md has their equations."""

from cnorm.cells.presets.parts import PAPER, affine
from cnorm.cells.specs import CellSpec

# of danijar's implementation and its ports: the reset gate multiplies the whole candidate
DREAMER = {"kind": "GRU", "gates": "rnz", "scope": "sum", "reset": "candidate", "update_bias": -1.0, "eps": 1e-3}

CELLS = (
    CellSpec(
        "GRU",
        "ba2016",
        f"{PAPER}, Eq. 26-28",
        "zrn",
        (
            ("weight_x", "2H I", "weight_x[zr]"),
            ("weight_h", "2H H", "weight_h[zr]"),
            *affine(("gain_x", "bias_x", "x[zr]"), ("gain_h", "bias_h", "h[zr]"), size="2H"),
            ("weight_xn", "H I", "weight_x[n]"),
            ("weight_hn", "H H", "weight_h[n]"),
            *affine(("gain_xn", "bias_xn", "x[n]"), ("gain_hn", "bias_hn", "h[n]"), size="H"),
        ),
        scope="split",
        grouping="gates_and_candidate",
        eps=1e-5,
    ),
    CellSpec(
        "GRU",
        "ba2016_code",
        "github.com/ryankiros/layer-norm, layers.py, lngru_layer",
        "rzn",
        (
            ("W", "I 2H", "weight_x.T[rz]"),
            ("U", "H 2H", "weight_h.T[rz]"),
            ("Wx", "I H", "weight_x.T[n]"),
            ("Ux", "H H", "weight_h.T[n]"),
            ("b", "2H", "inside_x[rz]"),
            ("bx", "H", "inside_x[n]"),
            *affine(("s1", "b1", "x[rz]"), ("s3", "b3", "h[rz]"), size="2H"),
            *affine(("s2", "b2", "x[n]"), ("s4", "b4", "h[n]"), size="H"),
        ),
        scope="split",
        grouping="gates_and_candidate",
        update="keep",
        eps=1e-5,
    ),
    CellSpec(
        "GRU",
        "haste",
        "github.com/lmnt-com/haste, frameworks/pytorch/layer_norm_gru.py",
        "zrn",
        (
            ("kernel", "I 3H", "weight_x.T"),
            ("recurrent_kernel", "H 3H", "weight_h.T"),
            ("bias", "3H", "bias_x"),
            ("recurrent_bias", "3H", "bias_h"),
            ("gamma", "2 3H", "gain_x gain_h"),
        ),
        scope="split",
        update="keep",
        eps=1e-5,
    ),
    CellSpec(
        name="dreamer_v2",
        source="github.com/danijar/dreamerv2, dreamerv2/common/nets.py, GRUCell",
        weights=(
            ("kernel", "I+H 3H", "weight_x.T weight_h.T"),
            ("bias", "3H", "inside_x"),
            ("gamma", "3H", "gain"),
            ("beta", "3H", "bias"),
        ),
        **DREAMER,
    ),
    CellSpec(
        name="dreamer_v3",
        source="github.com/danijar/dreamerv3 of 2023 (8fa35f8), dreamerv3/nets.py, RSSM._gru",
        weights=(
            ("kernel", "H+I 3H", "weight_h.T weight_x.T"),
            ("norm/scale", "3H", "gain"),
            ("norm/bias", "3H", "bias"),
        ),
        **DREAMER,
    ),
    CellSpec(
        name="dreamer_torch",
        source="github.com/NM512/dreamerv3-torch, networks.py, GRUCell",
        weights=(
            ("layers.GRU_linear.weight", "3H I+H", "weight_x weight_h"),
            ("layers.GRU_norm.weight", "3H", "gain"),
            ("layers.GRU_norm.bias", "3H", "bias"),
        ),
        **DREAMER,
    ),
    CellSpec(
        "GRU",
        "torch",
        "pytorch.org, torch.nn.GRU and GRUCell",
        "rzn",
        (
            ("weight_ih_l{layer}{reverse}", "3H I", "weight_x"),
            ("weight_hh_l{layer}{reverse}", "3H H", "weight_h"),
            ("bias_ih_l{layer}{reverse}", "3H", "bias_x?"),
            ("bias_hh_l{layer}{reverse}", "3H", "bias_h?"),
        ),
        update="keep",
    ),
    CellSpec(
        "GRU",
        "keras",
        "keras.io, keras.layers.GRU with reset_after=True",
        "zrn",
        (
            ("kernel", "I 3H", "weight_x.T"),
            ("recurrent_kernel", "H 3H", "weight_h.T"),
            ("bias", "2 3H", "bias_x bias_h?"),
        ),
        update="keep",
    ),
    CellSpec(
        "GRU",
        "keras_reset_before",
        "keras.io, keras.layers.GRU with reset_after=False",
        "zrn",
        (("kernel", "I 3H", "weight_x.T"), ("recurrent_kernel", "H 3H", "weight_h.T"), ("bias", "3H", "bias?")),
        update="keep",
        reset="before",
    ),
    CellSpec(
        "GRU",
        "onnx",
        "onnx.ai, operator GRU with linear_before_reset = 0",
        "zrn",
        (("W", "1 3H I", "weight_x"), ("R", "1 3H H", "weight_h"), ("B", "1 6H", "bias_x bias_h?")),
        update="keep",
        reset="before",
    ),
    CellSpec(
        "GRU",
        "onnx_linear_before_reset",
        "onnx.ai, operator GRU with linear_before_reset = 1",
        "zrn",
        (("W", "1 3H I", "weight_x"), ("R", "1 3H H", "weight_h"), ("B", "1 6H", "bias_x bias_h?")),
        update="keep",
    ),
)
