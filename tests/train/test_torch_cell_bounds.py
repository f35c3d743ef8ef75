"""Gradients through `cnorm.torch.LSTMCell`, `GRUCell` and `RNNCell` against float64, on every instruction set."""

import cells
import pytest
from trajectories import INPUTS, UNITS, assert_steps_within_the_bound

import cnorm

torch = pytest.importorskip("torch")
import cnorm.torch as ct  # noqa: E402

CELLS = {"LSTM": ct.LSTMCell, "GRU": ct.GRUCell, "RNN": ct.RNNCell}


def by_cell(layer, batch):
    """As `trajectories.by_tape`, through autograd."""
    spec, projected = layer.spec, layer.output_size if layer.output_size != layer.units else 0
    cell = CELLS[spec.kind](INPUTS, UNITS, preset=spec, eps=cells.EPS.get((spec.kind, spec.name)), proj_size=projected)
    cell.load_state_dict({name: torch.from_numpy(w.copy()) for name, w in layer.weights.items()})

    def gradients(x, state, dy, dstate):
        x, *state = inputs = [torch.from_numpy(a).requires_grad_() for a in (x, *state)]
        after = cell(x, tuple(state) if spec.kind == "LSTM" else state[0])
        after = after if spec.kind == "LSTM" else (after,)
        given = [torch.from_numpy(a) for a in (dstate[0] + dy, *dstate[1:])]
        found = torch.autograd.grad(after, inputs + list(cell.parameters()), given)
        own = [name if name in layer.weights else f"{name}_l0" for name, _ in cell.named_parameters()]  # of torch.nn
        names = ["dx", "dh", "dc"][: len(inputs)] + own
        return {name: part.numpy() for name, part in zip(names, found, strict=True)}

    return gradients


def on_every_isa(layer, batch):
    """As `by_cell`; the bits of all instruction sets must be the same, whichever packed the weights."""
    made = by_cell(layer, batch)

    def gradients(*given):
        before, results = cnorm.active_isa(), []
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            results += [made(*given), by_cell(layer, batch)(*given)]
        cnorm.use_isa(before)
        for other in results[1:]:
            for name, wanted in results[0].items():
                assert other[name].tobytes() == wanted.tobytes(), name
        return results[0]

    return gradients


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("shape", [(3, 3), (1, 33)], ids=str)
@pytest.mark.parametrize("key", sorted(cnorm.PRESETS), ids="-".join)
def test_every_preset(key, shape, rng):
    assert_steps_within_the_bound(key, shape, rng, by=on_every_isa)
