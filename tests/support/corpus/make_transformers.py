"""Write transformers.tar.xz: small BERT, MiniLM, GPT-2 and ViT models. Needs torch and transformers; the tests do not.

    PYTHONPATH=tests/support python -P -m corpus.make_transformers

The models are built from a configuration, so nothing is downloaded. `sound_transformers.py` runs the validator on
larger ones. A file is named FAMILY@EXPORTER-WEIGHTS.onnx. FORMS says what the validator must find in it.
"""

import tempfile
import warnings
from pathlib import Path

import numpy as np
from corpus.archive import write

# Family: model type, model class and the options of its configuration class that are not sizes.
FAMILIES = {
    "bert": ("bert", "BertModel", {"hidden_act": "gelu"}),
    "minilm": ("bert", "BertModel", {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "layer_norm_eps": 1e-12}),
    "gpt2": ("gpt2", "GPT2Model", {"activation_function": "gelu_new"}),
    "vit": ("vit", "ViTModel", {"hidden_act": "gelu"}),
}
# Norms in a model of two layers, three in MiniLM.
NORMS = {"bert": 5, "minilm": 7, "gpt2": 5, "vit": 5}
# Conditioning (max|x| / std) at which the norms of the trained-like weights are wanted; None for random weights.
WEIGHTS = {"random": None, "trained-3": 3.0, "trained-30": 30.0, "trained-100": 100.0}
EXPORTERS = ("torchscript", "dynamo")
FORMS = {family: ["layer"] * count for family, count in NORMS.items()}
VOCABULARY, HEADS, PIXELS, PATCH = 96, 4, 16, 4


def build(family, hidden, weights, seed=0):
    """A model of `family` in evaluation mode, with the weights named in WEIGHTS."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind, name, options = FAMILIES[family]
    layers = NORMS[family] // 2
    sizes = {
        "bert": {"vocab_size": VOCABULARY, "intermediate_size": 2 * hidden, "max_position_embeddings": 64},
        "gpt2": {"vocab_size": VOCABULARY, "n_positions": 64, "n_inner": 2 * hidden, "use_cache": False},
        "vit": {"image_size": PIXELS, "patch_size": PATCH, "intermediate_size": 2 * hidden},
    }[kind]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    settings = transformers.AutoConfig.for_model(kind, **shape, **sizes, **options)
    settings._attn_implementation = "eager"
    extra = {} if kind == "gpt2" else {"add_pooling_layer": False}
    model = getattr(transformers, name)(settings, **extra).eval().requires_grad_(False)
    if WEIGHTS[weights] is not None:
        _train(model, WEIGHTS[weights], np.random.default_rng(seed))
    return model


def _train(model, conditioning, rng):
    """Change random weights in place to what training makes of them.

    Gains and biases with a spread and some large ones, sharp attention, a few features of the residual stream that are
    far larger than the others, and a mean of `conditioning` standard deviations.
    """
    import torch

    def drawn(values):
        return torch.from_numpy(np.asarray(values, np.float32))

    for name, value in model.named_parameters():
        inner = name.rsplit(".", 2)[-2].lower()
        if "norm" in inner or inner.startswith("ln_"):
            if name.endswith("weight"):
                gains = np.exp(rng.normal(0, 0.5, value.shape)) * np.where(rng.random(value.shape) < 0.02, 8, 1)
                value.copy_(drawn(gains))
            else:
                value.copy_(drawn(rng.normal(0, 0.3, value.shape)))
        elif "embeddings" in name or "wte" in name or "wpe" in name:
            value.mul_(20.0)  # standard deviation 0.4
            if "position" in name or "wpe" in name:
                value.add_(conditioning)
        elif name.endswith("bias"):
            value.copy_(drawn(rng.normal(0, 0.1, value.shape)))
            if name.endswith(("output.dense.bias", "c_proj.bias", "fc2.bias", "o_proj.bias")):
                value.add_(conditioning)
                value[::97] += 20.0
        else:
            value.mul_(4.0 if any(part in name for part in ("query", "key", "q_proj", "k_proj", "c_attn")) else 3.0)


def inputs(family, batch, length, seed):
    """Named inputs as a tokenizer or an image processor makes them."""
    rng = np.random.default_rng(seed)
    if family == "vit":
        smooth = rng.normal(size=(batch, 3, 4, 4)).repeat(PIXELS // 4, 2).repeat(PIXELS // 4, 3)
        pixels = np.clip(smooth + 0.2 * rng.normal(size=(batch, 3, PIXELS, PIXELS)), -2.1, 2.6)
        return {"pixel_values": pixels.astype(np.float32)}
    tokens = np.minimum(rng.zipf(1.3, (batch, length)), VOCABULARY - 1)
    given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    given["attention_mask"][0, length - length // 4 :] = 0
    if family != "gpt2":
        given["token_type_ids"] = np.broadcast_to(np.arange(length) >= length // 2, tokens.shape)
    return {name: np.ascontiguousarray(value, np.int64) for name, value in given.items()}


def export(model, family, exporter, file):
    """Write an ONNX file with free batch and length; `file` is a path."""
    import torch

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *arguments):
            names = ("pixel_values",) if family == "vit" else ("input_ids", "attention_mask", "token_type_ids")
            return self.model(**dict(zip(names, arguments, strict=False))).last_hidden_state

    given = inputs(family, 2, 8, 0)
    arguments = tuple(map(torch.from_numpy, given.values()))
    dims = {0: "batch"} if family == "vit" else {0: "batch", 1: "length"}
    how = {"input_names": list(given), "output_names": ["hidden"], "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torchscript":
            axes = dict.fromkeys(given, dims)
            torch.onnx.export(
                Hidden().eval(), arguments, file, opset_version=17, dynamo=False, dynamic_axes=axes, **how
            )
        else:
            shapes = (tuple(dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for _ in given),)
            torch.onnx.export(
                Hidden().eval(),
                arguments,
                file,
                opset_version=18,
                dynamo=True,
                dynamic_shapes=shapes,
                external_data=False,
                **how,
            )


def files():
    """(name, bytes) of every file: weights of 16 columns, rounded to 1/16 so that they compress."""
    import torch

    for family in FAMILIES:
        for weights in ("random", "trained-100"):
            model = build(family, 16, weights)
            for value in model.parameters():
                if value.ndim > 1:
                    value.copy_(torch.round(value * 16) / 16 if weights != "random" else torch.sign(value) / 16)
            for exporter in EXPORTERS:
                with tempfile.TemporaryDirectory() as folder:
                    target = Path(folder) / "model.onnx"
                    export(model, family, exporter, target)
                    yield f"{family}@{exporter}-{weights}.onnx", target.read_bytes()


if __name__ == "__main__":
    write("transformers", files())
