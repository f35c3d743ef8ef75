"""Write jax.tar.xz: norms of JAX, Flax and Equinox, by jax2onnx. Needs jax, flax, equinox and jax2onnx.

    PYTHONPATH=tests/support python -P -m corpus.make_jax

A file is named FORM@jax2onnx-OPSET.onnx, with a suffix where norms are decomposed on request. FORMS says what the
validator must find in it: the formula of each norm, "~" before a near miss.
"""

from corpus.archive import write

N = 16
FORMS = {
    "linen_layer": ["layer"],
    "linen_layer_no_affine": ["layer"],
    "linen_layer_two_pass": ["layer"],
    "linen_layer_half": ["layer"],
    "linen_rms": ["rms"],
    "linen_group": ["layer"],
    "nnx_layer": ["layer"],
    "nnx_layer_two_pass": ["layer"],
    "nnx_rms": ["rms"],
    "nnx_group": ["layer"],
    "eqx_layer": ["layer"],
    "eqx_layer_no_affine": ["layer"],
    "eqx_rms": ["rms"],
    "standardize": ["layer"],
    "jnp_var": ["layer"],
    "jnp_std": ["~layer"],
    "by_hand": ["layer"],
    "rms_by_hand": ["rms"],
    "one_pass": ["layer"],
    "first_axis": ["layer"],
    "two_axes": ["layer"],
    "transformer": ["layer", "layer"],
    "scan": ["layer"],
    "softmax": [],
}
VARIANTS = [(18, "auto"), (21, "auto"), (23, "auto"), (23, "force_decomposed")]


def forms():
    """Functions of x [2, 5, N] by name, in the order of FORMS."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    from flax import linen, nnx

    shape, gain, bias = (2, 5, N), jnp.linspace(0.5, 1.5, N), jnp.linspace(-1, 1, N)

    def of_linen(module):
        """The module with values of its parameters that are not all equal."""
        found = module.init(jax.random.key(0), jnp.zeros(shape))
        leaves, tree = jax.tree.flatten(found)
        varied = [jax.random.normal(jax.random.key(i), leaf.shape) + leaf for i, leaf in enumerate(leaves)]
        return lambda x: module.apply(jax.tree.unflatten(tree, varied), x)

    def of_nnx(module):
        for name, value in (("scale", gain), ("bias", bias)):
            if getattr(module, name, None) is not None and getattr(module, name).get_value() is not None:
                getattr(module, name).set_value(value)
        return module

    def of_eqx(module):
        for name, value in (("weight", gain), ("bias", bias)):
            if getattr(module, name, None) is not None:
                module = eqx.tree_at(lambda m, name=name: getattr(m, name), module, value)
        return jax.vmap(jax.vmap(module))

    def mean(x, axis=-1):
        return jnp.mean(x, axis, keepdims=True)

    class Transformer(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x))
            return x + linen.Dense(N)(linen.gelu(linen.Dense(N)(linen.LayerNorm()(x))))

    def scan(x):
        weight = jnp.eye(N) * 0.5

        def step(h, u):
            s = u + h @ weight
            h = jnp.tanh((s - mean(s)) * jax.lax.rsqrt(jnp.var(s, -1, keepdims=True) + 1e-5) * gain + bias)
            return h, h

        return jax.lax.scan(step, jnp.zeros((2, N)), x.swapaxes(0, 1))[1]

    rngs = nnx.Rngs(0)
    made = [
        of_linen(linen.LayerNorm()),
        of_linen(linen.LayerNorm(use_bias=False, use_scale=False)),
        of_linen(linen.LayerNorm(use_fast_variance=False)),
        of_linen(linen.LayerNorm(dtype=jnp.float16)),
        of_linen(linen.RMSNorm()),
        of_linen(linen.GroupNorm(4)),
        of_nnx(nnx.LayerNorm(N, rngs=rngs)),
        of_nnx(nnx.LayerNorm(N, use_fast_variance=False, rngs=rngs)),
        of_nnx(nnx.RMSNorm(N, rngs=rngs)),
        of_nnx(nnx.GroupNorm(N, 4, rngs=rngs)),
        of_eqx(eqx.nn.LayerNorm(N)),
        of_eqx(eqx.nn.LayerNorm(N, use_weight=False, use_bias=False)),
        of_eqx(eqx.nn.RMSNorm(N)),
        lambda x: jax.nn.standardize(x, epsilon=1e-5),
        lambda x: (x - mean(x)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * gain,
        lambda x: (x - mean(x)) / (jnp.std(x, -1, keepdims=True) + 1e-5) * gain,
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean((x - mean(x)) ** 2) + 1e-5) * gain + bias,
        lambda x: x * jax.lax.rsqrt(mean(x**2) + 1e-6) * gain,
        lambda x: (x - mean(x)) / jnp.sqrt(mean(x * x) - mean(x) ** 2 + 1e-5),
        lambda x: (x - mean(x, 1)) / jnp.sqrt(jnp.var(x, 1, keepdims=True) + 1e-5),
        lambda x: (x - mean(x, (1, 2))) / jnp.sqrt(jnp.var(x, (1, 2), keepdims=True) + 1e-5),
        of_linen(Transformer()),
        scan,
        lambda x: jax.nn.softmax(x),
    ]
    return dict(zip(FORMS, made, strict=True))


def files():
    """(name, bytes) of every file."""
    from jax2onnx import to_onnx

    for name, function in forms().items():
        for opset, mode in VARIANTS:
            suffix = "" if mode == "auto" else "-decomposed"
            try:
                model = to_onnx(function, [(2, 5, N)], opset=opset, normalization_mode=mode)
            except Exception as error:
                print(f"{name} {opset} {mode}: not exported: {type(error).__name__}: {str(error)[:100]}")
                continue
            yield f"{name}@jax2onnx-{opset}{suffix}.onnx", model.SerializeToString()


if __name__ == "__main__":
    write("jax", files())
