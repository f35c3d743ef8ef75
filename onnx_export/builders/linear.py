"""y = weight x + bias."""


def states(layer) -> dict[str, int]:
    return {}


def build(graph, layer, weights, x, states):
    if not graph.sequence:
        bias = [weights["bias"]] if "bias" in weights else []
        return graph.add("Gemm", x, weights["weight"], *bias, name="y", transB=1), {}
    turned = graph.add("Transpose", weights["weight"], name="weight_turned", perm=[1, 0])  # Gemm has two axes only
    y = graph.add("MatMul", x, turned, name="y")
    return (graph.add("Add", y, weights["bias"], name="y_biased") if "bias" in weights else y), {}
