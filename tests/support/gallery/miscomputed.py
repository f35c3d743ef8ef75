"""The four graph patterns that optimisers have miscomputed."""

from __future__ import annotations

import numpy as np

from gallery.context import function, if_model
from gallery.specimen import (
    HALF,
    OK,
    N,
    Specimen,
    decomposed,
    model,
    native,
    node,
    parts,
    rng,
    specimen,
    trapped,
    value,
    weights,
)
from onnx_export.validation import traps


@specimen
def trap_eps_first():
    norms, code, findings = trapped("eps-first")
    return Specimen(model(*parts(decomposed(eps=0.1, eps_first=True))), norms, findings, code)


@specimen
def trap_exponent_4():
    norms, code, findings = trapped("exponent")
    built = model(*parts(decomposed(power=4.0)))
    return Specimen(built, [("~layer", *norms[0][1:])], findings | {"near-miss"}, code)


@specimen
def trap_keepdims():
    norms, code, findings = trapped("keepdims")
    built = model(*parts(decomposed(keepdims=0), (N, N)))
    return Specimen(built, [("~layer", *norms[0][1:])], findings | {"near-miss"}, code)


@specimen
def trap_skip_axis():
    norms, code, findings = trapped("skip-axis")
    nodes = [node("Add", "x skip", "sum"), native("sum", axis=1)]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs), norms, findings, code)


@specimen
def norm_after_a_trap_that_looking_springs():
    """Tapping the inputs disables the wrong fusion, so they do not show that the second norm's input was wrong."""
    norms, code, findings = trapped("skip-axis")
    nodes = [node("Add", "x skip", "sum"), native("sum", "h", axis=1), node("Tanh", "h", "t"), native("t")]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    return Specimen(model(nodes, constants=weights(), inputs=inputs), [*norms, OK], findings, code)


@specimen
def trap_skip_axis_with_its_sum_as_output():
    """The sum is a graph output, which disables the wrong fusion in the model as in a tapped run: the norm is right."""
    nodes = [node("Add", "x skip", "sum"), native("sum", axis=1)]
    inputs = [value("x", (2, N, N)), value("skip", (2, N, N))]
    built = model(nodes, constants=weights(), inputs=inputs, outputs=[value("sum"), value("y")])
    findings = {"miscomputed"} if traps.miscomputes("skip-axis") else set()
    return Specimen(built, [OK], findings)


@specimen
def trap_inside_if():
    norms, code, findings = trapped("eps-first")
    nodes, constants = decomposed(y="t", eps=0.1, eps_first=True)
    return Specimen(if_model(nodes, constants)[0], norms, findings, code)


@specimen
def trap_inside_a_local_function():
    norms, code, findings = trapped("eps-first")
    built = decomposed(eps=0.1, eps_first=True)
    calls = [node("Norm", "x", "y", domain="local")]
    return Specimen(model(calls, functions=[function("Norm", *built)]), norms, findings, code)


@specimen
def drift_is_not_blamed():
    """Twelve steep layers between norms: optimised and unoptimised inputs diverge, but every norm is right."""
    nodes, constants, x = [], {}, "x"
    draw = rng()
    for i in range(12):
        norm, stored = decomposed(x=x, y=f"n{i}", prefix=f"p{i}_", width=64)
        constants |= stored | {f"w{i}": draw.normal(size=(64, 64)).astype(np.float32)}
        constants[f"b{i}"] = draw.normal(size=64).astype(np.float32)
        nodes += [
            *norm,
            node("MatMul", f"n{i} w{i}", f"m{i}"),
            node("Add", f"m{i} b{i}", f"a{i}"),
            node("Sin", f"a{i}", f"h{i}"),
        ]
        x = f"h{i}"
    nodes.append(node("Identity", x, "y"))
    return Specimen(model(nodes, (4, 64), constants), [OK] * 12)


def half_chain(norm, mean=0.0, count=3, shape=(64, 64), gain=0.125):
    """float16 layers with norms between; onnxruntime keeps float32 between nodes unless the value is an output."""
    draw = rng()
    nodes, x = [], "x"
    constants = {f"w{i}": (gain * draw.normal(size=(64, 64))).astype(np.float16) for i in range(count)}
    constants |= {"mean": np.full(64, mean, np.float16)}
    for i in range(count):
        more, stored = norm(f"a{i}", f"y{i}", f"p{i}_")
        constants |= stored
        nodes += [node("MatMul", f"{x} w{i}", f"m{i}"), node("Sin", f"m{i}", f"s{i}")]
        nodes += [node("Add", f"s{i} mean", f"a{i}"), *more]
        x = f"y{i}"
    return model([*nodes, node("Identity", x, "y")], shape, constants, dtype=HALF)


def native_float16_norm(x, y, prefix):
    affine = weights(64, np.float16)
    return [native(x, y, f"{prefix}scale", f"{prefix}bias")], {f"{prefix}{name}": a for name, a in affine.items()}


@specimen
def float16_norms_in_a_row():
    """Each norm is judged on inputs and result of the same run, because other runs round at other places."""
    return Specimen(half_chain(native_float16_norm, 3.0), [OK] * 3)


@specimen
def float16_decomposed_norms_in_a_row():
    def norm(x, y, prefix):
        return decomposed(x=x, y=y, prefix=prefix, dtype=np.float16, width=64)

    return Specimen(half_chain(norm, 3.0), [OK] * 3)


@specimen
def float16_norms_without_a_kernel_of_that_type():
    """InstanceNormalization in float32 takes the preceding sum unrounded: no fault, at any mean."""

    def norm(x, y, prefix):
        affine = {f"{prefix}ones": np.ones(8, np.float16), f"{prefix}zeros": np.zeros(8, np.float16)}
        return [native(x, y, f"{prefix}ones", f"{prefix}zeros", op="InstanceNormalization")], affine

    return Specimen(half_chain(norm, 3.0, shape=(2, 8, 64)), [("instance", "ok", "")] * 3)


@specimen
def float16_drift_by_looking():
    """Reshaped sums are rounded to float16 only where they are outputs."""

    def norm(x, y, prefix):
        constants = {"ones": np.ones(8, np.float16), "zeros": np.zeros(8, np.float16)}
        constants |= {"split": np.array([8, 8, -1]), "joined": np.array([64, 64])}
        reshape = node("Reshape", f"{x} split", f"{prefix}x"), node("Reshape", f"{prefix}y joined", y)
        inner = native(f"{prefix}x", f"{prefix}y", "ones", "zeros", op="InstanceNormalization")
        return [reshape[0], inner, reshape[1]], constants

    return Specimen(half_chain(norm, 3.0, count=6, gain=0.5), [("instance", "ok", "")] * 6)


@specimen
def float16_norms_in_a_row_at_a_large_mean():
    return Specimen(half_chain(native_float16_norm, 30.0), [OK] * 3)


def group_norm_chain(mean, count):
    def norm(x, y, prefix):
        affine = {f"{prefix}ones": np.ones(8, np.float16), f"{prefix}zeros": np.zeros(8, np.float16)}
        return [native(x, y, f"{prefix}ones", f"{prefix}zeros", op="GroupNormalization", num_groups=2)], affine

    built = half_chain(norm, mean, count, shape=(2, 8, 64))
    built.opset_import[0].version, built.ir_version = 21, 10
    return built


@specimen
def float16_kernel_that_is_at_fault():
    """GroupNormalization's one-pass variance at a mean of 100: wrong in isolation, too, so not for lack of rounding."""
    return Specimen(group_norm_chain(100.0, 2), [("group", "wrong", "kernel")] * 2, exit_code=1)


@specimen
def float16_kernel_that_is_at_risk():
    """The same on stress rows only: the addition before it does not excuse an error of the isolated norm."""
    return Specimen(group_norm_chain(0.0, 1), [("group", "risky", "kernel")])


@specimen
def float16_trap_between_sound_norms():
    """Drift is measured, so a norm that the optimiser breaks is still reported, in float16 as well."""
    norms, code, findings = trapped("exponent")

    def norm(x, y, prefix):
        power = 4.0 if prefix == "p1_" else 2.0
        return decomposed(x=x, y=y, prefix=prefix, dtype=np.float16, width=64, power=power)

    broken = ("~layer", *norms[0][1:])
    return Specimen(half_chain(norm, 1.0), [OK, broken, OK], findings | {"near-miss"}, code)


@specimen
def eps_first_of_the_default_size():
    """The optimiser replaces eps by its default 1e-5, which it already was: nothing to report."""
    return Specimen(model(*parts(decomposed(eps=1e-5, eps_first=True))))


@specimen
def trap_in_the_second_of_two_norms():
    """The sound norms before and after the broken one keep their verdicts."""
    norms, code, findings = trapped("eps-first")
    first, constants = decomposed(y="h", prefix="a_", square="Mul")
    second, more = decomposed(x="h", y="h2", prefix="b_", eps=0.1, eps_first=True)
    third, last = decomposed(x="h2", y="y", prefix="c_", square="Mul")
    built = model([*first, *second, *third], (3, N), constants | more | last)
    return Specimen(built, [OK, *norms, OK], findings, code)
