"""Write pytorch.tar.xz: norms in every form, by PyTorch's exporters at several opsets. Needs torch; the tests do not.

    PYTHONPATH=tests/support python -P -m corpus.make_pytorch

A file is named FORM@EXPORTER-OPSET.onnx. FORMS says what the validator must find in it: the formula of each norm, "~"
before a near miss.
"""

import io
import warnings

from corpus.archive import write

N = 16
FORMS = {
    "layer": ["layer"],
    "layer_no_bias": ["layer"],
    "layer_no_affine": ["layer"],
    "layer_two_axes": ["layer"],
    "layer_half": ["layer"],
    "layer_large_eps": ["layer"],
    "group": ["instance"],  # the groups are its channels
    "instance": ["instance"],
    "var_rsqrt": ["layer"],
    "var_sqrt_div": ["layer"],
    "var_pow": ["layer"],
    "var_mean": ["layer"],
    "mean_of_squares": ["layer"],
    "product_of_deviations": ["layer"],
    "one_pass": ["layer"],
    "one_pass_clamped": ["layer"],
    "sum_over_n": ["layer"],
    "scale_first": ["layer"],
    "channels_first": ["layer"],
    "global": ["layer"],
    "mean_of_mean": ["layer"],
    "pooled": ["layer"],
    "adaptive": ["layer"],
    "folded": ["layer"],
    "std_squared": ["layer"],
    "rms": ["rms"],
    "rms_one_plus_gain": ["rms"],
    "rms_after_product": ["rms"],
    "rms_pow": ["rms"],
    "rms_half": ["rms"],
    "std_plus_eps": ["~layer"],
    "eps_outside": ["~layer"],
    "unbiased": ["~layer"],
    "not_centred": ["~layer"],
    "no_root": ["~layer"],
    "clamped_variance": ["~layer"],
    "normalize_times_root": ["~rms"],
    "normalize": [],
    "softmax": [],
    "two_layers": ["layer", "layer"],
    "residual": ["layer"],
    "adaptive_gain": ["layer"],
}


def functions():
    """The forms, as functions of x [2, 5, N]."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    gain, bias = torch.linspace(0.5, 1.5, N), torch.linspace(-1, 1, N)
    norm = nn.LayerNorm(N).eval().requires_grad_(False)
    with torch.no_grad():
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)

    def mean(x):
        return x.mean(-1, keepdim=True)

    def var(x):
        return ((x - mean(x)) ** 2).mean(-1, keepdim=True)

    def centred(x):
        return x - mean(x)

    def pooled(x):
        return F.avg_pool1d(x, N)

    def adaptive(x):
        return F.adaptive_avg_pool1d(x, 1)

    def by(x, average):
        d = x - average(x)
        return d / (average(d * d) + 1e-5).sqrt()

    return {
        "layer": norm,
        "layer_no_bias": nn.LayerNorm(N, bias=False),
        "layer_no_affine": nn.LayerNorm(N, elementwise_affine=False),
        "layer_two_axes": nn.LayerNorm((5, N)),
        "layer_half": lambda x: F.layer_norm(x.half(), (N,), gain.half(), bias.half()).float(),
        "layer_large_eps": nn.LayerNorm(N, eps=1e-3),
        "group": nn.GroupNorm(5, 5),
        "instance": nn.InstanceNorm1d(5),
        "var_rsqrt": lambda x: centred(x) * torch.rsqrt(var(x) + 1e-5) * gain + bias,
        "var_sqrt_div": lambda x: centred(x) / torch.sqrt(var(x) + 1e-5) * gain + bias,
        "var_pow": lambda x: centred(x) * (var(x) + 1e-5) ** -0.5 * gain + bias,
        "var_mean": lambda x: centred(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * gain,
        "mean_of_squares": lambda x: centred(x) / torch.sqrt(centred(x).pow(2).mean(-1, keepdim=True) + 1e-5),
        "product_of_deviations": lambda x: centred(x) / ((centred(x) * centred(x)).mean(-1, True) + 1e-5).sqrt(),
        "one_pass": lambda x: centred(x) / ((x * x).mean(-1, True) - mean(x) ** 2 + 1e-5).sqrt() * gain,
        "one_pass_clamped": lambda x: centred(x) / (((x * x).mean(-1, True) - mean(x) ** 2).clamp(min=0) + 1e-5).sqrt(),
        "sum_over_n": lambda x: centred(x) / ((centred(x) ** 2).sum(-1, True) / N + 1e-5).sqrt(),
        "scale_first": lambda x: gain * centred(x) / torch.sqrt(var(x) + 1e-5) + bias,
        "channels_first": lambda x: (x - x.mean(1, True)) / ((x - x.mean(1, True)) ** 2).mean(1, True).add(1e-5).sqrt(),
        "global": lambda x: (
            (x - x.mean((1, 2), True)) / ((x - x.mean((1, 2), True)) ** 2).mean((1, 2), True).add(1e-5).sqrt()
        ),
        "mean_of_mean": lambda x: (
            (x - x.mean(1, True).mean(2, True))
            / ((x - x.mean(1, True).mean(2, True)) ** 2).mean(1, True).mean(2, True).add(1e-5).sqrt()
        ),
        "pooled": lambda x: (x - pooled(x)) / (pooled((x - pooled(x)) ** 2) + 1e-5).sqrt(),
        "adaptive": lambda x: (x - adaptive(x)) / (adaptive((x - adaptive(x)) ** 2) + 1e-5).sqrt(),
        "folded": lambda x: x * torch.rsqrt(var(x) + 1e-5) - mean(x) * torch.rsqrt(var(x) + 1e-5),
        "std_squared": lambda x: centred(x) / torch.sqrt(var(x).sqrt() ** 2 + 1e-5),
        "rms": lambda x: x * torch.rsqrt((x * x).mean(-1, True) + 1e-6) * gain,
        "rms_one_plus_gain": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6) * (1 + gain),
        "rms_after_product": lambda x: (x * 4.0) * torch.rsqrt((x * 4.0).pow(2).mean(-1, True) + 1e-6) * gain,
        "rms_pow": lambda x: x / (x.pow(2).mean(-1, True) + 1e-6).sqrt() * gain,
        "rms_half": lambda x: gain.half() * (x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)).half(),
        "std_plus_eps": lambda x: gain * centred(x) / (x.std(-1, keepdim=True) + 1e-6) + bias,
        "eps_outside": lambda x: centred(x) / (var(x).sqrt() + 1e-5) * gain,
        "unbiased": lambda x: centred(x) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * gain,
        "not_centred": lambda x: x / torch.sqrt(var(x) + 1e-5) * gain + bias,
        "no_root": lambda x: centred(x) / (var(x) + 1e-5) * gain,
        "clamped_variance": lambda x: centred(x) / torch.sqrt(var(x).clamp(min=1e-3)) * gain,
        "normalize_times_root": lambda x: F.normalize(x, dim=-1) * N**0.5 * gain,
        "normalize": lambda x: F.normalize(x, dim=-1),
        "softmax": lambda x: torch.softmax(x, -1),
        "two_layers": nn.Sequential(nn.LayerNorm(N), nn.ReLU(), nn.LayerNorm(N)),
        "residual": lambda x: x + norm(x).relu(),
        "adaptive_gain": lambda x: F.layer_norm(x, (N,)) * (1 + x.sigmoid()) + x.tanh(),
    }


EXPORTERS = [("old", 13), ("old", 14), ("old", 17), ("old", 18)]
CURRENT = ["layer", "var_rsqrt", "var_mean", "rms", "adaptive", "global"]


def files():
    """(name, bytes) of every file."""
    import torch

    class Form(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    warnings.simplefilter("ignore")
    cases = [(name, *each) for name in FORMS for each in EXPORTERS] + [(name, "current", 18) for name in CURRENT]
    made = functions()
    for name, exporter, opset in cases:
        form, x, file = Form(made[name]).eval(), torch.randn(2, 5, N), io.BytesIO()
        try:
            if exporter == "old":
                torch.onnx.export(form, (x,), file, opset_version=opset, dynamo=False)
                data = file.getvalue()
            else:
                program = torch.onnx.export(form, (x,), opset_version=opset, dynamo=True, verbose=False)
                data = program.model_proto.SerializeToString()
        except Exception as error:
            print(f"{name}@{exporter}-{opset}: not exported: {type(error).__name__}: {str(error)[:80]}")
            continue
        yield f"{name}@{exporter}-{opset}.onnx", data


if __name__ == "__main__":
    write("pytorch", files())
