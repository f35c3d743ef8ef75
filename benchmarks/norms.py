"""Time batch, group and instance norm in cnorm, in PyTorch if it is installed, and np.copyto, which copies x to y.

Every contender is checked against float64, and their samples are interleaved, as `cnorm bench` does for layer norm.
Prints a Markdown table: microseconds of cnorm, and the ratios of the other times to it; above 1, cnorm is faster.
"""

from importlib import util

import numpy as np

import cnorm
import cnorm_bench as bench
from cnorm_bench.contenders import Contender, memcpy_, times
from cnorm_bench.contenders.operations import check
from cnorm_bench.contenders.timing import empty, empty_like

SHAPES = ((128, 768), (16384, 1024), (64, 256, 1024))
GROUPS = (1, 8, 32)
EPS = 1e-5


def expected(x, dy, groups=None):
    """Reference y and dx in float64, of batch norm, or of group norm if groups is given; weight 1, bias 0."""
    wide = x.astype(np.float64)
    axes = (0, *range(2, x.ndim)) if groups is None else -1
    rows = wide if groups is None else wide.reshape(len(x) * groups, -1)
    var = rows.var(axes, keepdims=True)
    xhat = (rows - rows.mean(axes, keepdims=True)) / np.sqrt(var + EPS)
    g = dy.astype(np.float64).reshape(rows.shape)
    dx = (g - g.mean(axes, keepdims=True) - xhat * (g * xhat).mean(axes, keepdims=True)) / np.sqrt(var + EPS)
    return xhat.reshape(x.shape), dx.reshape(x.shape)


def cases(x, dy):
    """Yield (operation, cnorm's statement, PyTorch's, right result); the statements use the names of `main`."""
    y, dx = expected(x, dy)
    yield (
        "batch norm, inference",
        "cnorm.batch_norm_inference(x, mean, var, w, b, out=y)",
        "F.batch_norm(tx, tmean, tvar, tw, tb)",
        y,
    )
    yield "batch norm, training", "cnorm.batch_norm(x, w, b, out=y)", "F.batch_norm(tx, None, None, tw, tb, True)", y
    yield (
        "batch norm, backward",
        "cnorm.batch_norm_backward(dy, x, w, stats, out=(y, None, None))[0]",
        "backward(tdy, tx, tw, None, None, saved_mean, saved_rstd, True, 1e-5, [True, True, True])[0]",
        dx,
    )
    for groups in GROUPS:
        y, _ = expected(x, dy, groups)
        yield (
            f"group norm, {groups}",
            f"cnorm.group_norm(x, {groups}, w, b, out=y)",
            f"F.group_norm(tx, {groups}, tw, tb)",
            y,
        )
    if x.ndim > 2:
        yield (
            "instance norm",
            "cnorm.instance_norm(x, w, b, out=y)",
            "F.instance_norm(tx, None, None, tw, tb)",
            expected(x, dy, x.shape[1])[0],
        )


def main():
    bench.settle()
    rng = np.random.default_rng(0)
    print(f"cnorm {cnorm.__version__}, {cnorm.active_isa()}, float32, one thread\n")
    print("| x | operation | cnorm, us | np.copyto | PyTorch |\n|---|---|---:|---:|---:|")
    for shape in SHAPES:
        x, dy = empty(shape, np.float32), empty(shape, np.float32)
        x[:], dy[:] = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
        axes = (0, *range(2, x.ndim))
        mean, var = (moment(axes, np.float64).astype(np.float32) for moment in (x.mean, x.var))
        names = {"cnorm": cnorm, "x": x, "dy": dy, "y": empty_like(x), "mean": mean, "var": var}
        names |= {"w": np.ones_like(mean), "b": np.zeros_like(mean), "stats": cnorm.batch_norm(x, return_stats=True)[1]}
        if torch_here := util.find_spec("torch") is not None:
            names |= of_torch(**names)
        for what, ours, theirs, right in cases(x, dy):
            contenders = [Contender("cnorm", ours, names), *memcpy_.layer_norm(x.reshape(len(x), -1), None, None)]
            if torch_here:
                contenders.append(Contender("PyTorch", theirs, names))
            for contender in contenders:
                check(contender, (right,))
            medians = {label: float(np.median(samples)) for label, samples in times(contenders).items()}
            own = medians.pop("cnorm")
            ratios = [f"{medians[label] / own:.2f}" if label in medians else "" for label in ("np.copyto", "PyTorch")]
            print(f"| {'x'.join(map(str, shape))} | {what} | {own:.0f} | {' | '.join(ratios)} |", flush=True)


def of_torch(**arrays):
    import torch

    torch.set_num_threads(1)
    tensors = {f"t{name}": torch.from_numpy(array) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    _, mean, rstd = torch.native_batch_norm(tensors["tx"], None, None, None, None, True, 0.1, EPS)
    backward = torch.ops.aten.native_batch_norm_backward
    return tensors | {"F": torch.nn.functional, "saved_mean": mean, "saved_rstd": rstd, "backward": backward}


if __name__ == "__main__":
    main()
