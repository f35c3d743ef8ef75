"""Write recurrent.tar.xz: LSTM, GRU and RNN by PyTorch's exporters. Needs torch and onnxscript; the tests do not.

    PYTHONPATH=tests/support python -P -m corpus.make_recurrent

A file is named KIND_FORM@EXPORTER.onnx; KIND_FORM@EXPORTER.npz has its inputs and PyTorch's outputs.
"""

import io
import itertools
import warnings

import numpy as np
from corpus.archive import write

INPUTS, UNITS, STEPS, ROWS = 3, 4, 5, 2
# name -> (arguments of the layer, whether states are inputs)
FORMS = {
    "plain": ({}, False),
    "states": ({}, True),
    "two": ({"num_layers": 2}, False),
    "both": ({"bidirectional": True}, False),
    "both_states": ({"bidirectional": True}, True),
    "batch_first": ({"batch_first": True}, False),
    "no_bias": ({"bias": False}, True),
}
KINDS = ("LSTM", "GRU", "RNN")


def module_of(torch, kind, arguments, states):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = getattr(torch.nn, kind)(INPUTS, UNITS, **arguments)

        def forward(self, x, *given):
            if not states:
                return self.layer(x)[0]
            y, after = self.layer(x, given if kind == "LSTM" else given[0])
            return (y, *after) if kind == "LSTM" else (y, after)

    return Net().eval()


def files():
    """(name, bytes) of every file."""
    import torch

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for kind, (name, (arguments, states)) in itertools.product(KINDS, FORMS.items()):
        module = module_of(torch, kind, arguments, states)
        shape = (ROWS, STEPS, INPUTS) if arguments.get("batch_first") else (STEPS, ROWS, INPUTS)
        sides = 2 if arguments.get("bidirectional") else 1
        given = [torch.randn(sides, ROWS, UNITS) for _ in range((2 if kind == "LSTM" else 1) if states else 0)]
        feeds = (torch.randn(shape), *given)
        names = ["x", "h", "c"][: len(feeds)]
        with torch.no_grad():
            results = module(*feeds)
        results = results if isinstance(results, tuple) else (results,)
        outputs = ["y", "h_out", "c_out"][: len(results)]
        arrays = dict(zip(names + outputs, [each.numpy() for each in (*feeds, *results)], strict=True))
        for dynamo in (False, True):
            file, data = io.BytesIO(), io.BytesIO()
            options = {"input_names": names, "output_names": outputs, "dynamo": dynamo}
            if dynamo:
                program = torch.onnx.export(module, feeds, **options, verbose=False)
                file.write(program.model_proto.SerializeToString())
            else:
                torch.onnx.export(module, feeds, file, opset_version=17, **options)
            np.savez(data, **arrays)
            yield f"{kind}_{name}@{'current' if dynamo else 'older'}.onnx", file.getvalue()
            yield f"{kind}_{name}@{'current' if dynamo else 'older'}.npz", data.getvalue()


if __name__ == "__main__":
    write("recurrent", files())
