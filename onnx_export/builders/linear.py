"""y = weight x + bias."""

KIND = "Linear"
FIRST_OPSET = 13


def states(layer) -> dict[str, int]:
    return {}


def build(graph, layer, weights, x, states):
    bias = [weights["bias"]] if "bias" in weights else []
    return graph.add("Gemm", x, weights["weight"], *bias, name="y", transB=1), {}
