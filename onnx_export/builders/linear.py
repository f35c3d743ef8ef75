"""y = weight x + bias."""


def states(layer) -> dict[str, int]:
    return {}


def build(graph, layer, weights, x, states):
    return graph.product(x, weights["weight"], weights.get("bias"), "y"), {}
