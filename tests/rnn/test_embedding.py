"""Embedding: rows of a table by token id, gradients into it, and ids that are none."""

import math
import pickle
import re

import numpy as np
import pytest
from cells import random_cell
from models import random_linear
from tapes import back, own_gradients, run, tape_of

import cnorm
from cnorm.layers.embedding import in_tokens
from cnorm.serving import Sessions

TOKENS, WIDTH = 50, 70  # three panels, the last one not full
BAD = (math.nan, math.inf, -math.inf, 0.5, -1.0, -1e-30, 50.0, 1e9)


def table(rng, tokens=TOKENS, width=WIDTH):
    return rng.standard_normal((tokens, width)).astype(np.float32)


def ids(rng, *shape):
    return rng.integers(0, TOKENS, (*shape, 1)).astype(np.float32)


def language_model(rng, weights="float32"):
    gru = random_cell(("GRU", "torch"), rng, WIDTH, 19)[0]
    model = cnorm.Model([cnorm.Embedding(table(rng), name="token"), gru, random_linear(rng, 19, 5)])
    return model.with_weights(weights, smallest=1)


def mixed_model(rng):
    """Two ids in a frame of six numbers."""
    return cnorm.Model(
        [
            cnorm.Slice("input", 4, 5, name="first"),
            cnorm.Embedding(table(rng, 9, 3), name="of"),
            cnorm.Concat(["input", "of"], name="all"),
            cnorm.Slice("all", 1, 2),
            cnorm.Embedding(table(rng, 5, 4), name="second"),
            cnorm.Slice("input", 2, 4, name="numbers"),
            cnorm.Concat(["of", "second", "numbers"]),
            random_linear(rng, 9, 3),
        ]
    )


@pytest.mark.parametrize("weights", ["float32", "int8", "float16"])
def test_outputs_are_the_rows_of_the_table(weights, isa, rng):
    for tokens, width in ((TOKENS, WIDTH), (1, 1), (3, 16), (7, 32), (4097, 5)):
        model = cnorm.Model([cnorm.Embedding(table(rng, tokens, width))]).with_weights(weights, smallest=1)
        x = rng.integers(0, tokens, (90, 1)).astype(np.float32)
        wanted = model.layers[0].weights["weight"][x[:, 0].astype(int)]
        assert model.run(x).tobytes() == wanted.tobytes()
        assert np.stack([model.stream().step(frame) for frame in x]).tobytes() == wanted.tobytes()
        streams = [model.stream() for _ in x]
        assert model.step_many(streams, x).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("weights", ["int8", "float16"])
def test_rounded_tables(weights, rng):
    """A step of int8 is a 127th of the largest number of an output, which float32 divides and multiplies by."""
    w = table(rng)
    rounded = cnorm.Model([cnorm.Embedding(w)]).with_weights(weights, smallest=1).layers[0].weights["weight"]
    u = 2.0**-24
    bound = np.abs(w).max(0) / 127 * (0.5 + 4 * 127 * u) if weights == "int8" else np.abs(w) * 2.0**-11 + 2.0**-25
    assert (np.abs(np.float64(rounded) - w) <= bound).all()


def test_it_is_the_product_of_one_hot_frames(isa, rng):
    """Outputs and gradients have the bits of a Linear with the transposed table."""
    w, steps, batch = table(rng, 7), 23, 3
    tokens = rng.integers(0, 7, (steps, batch))
    dy = rng.standard_normal((steps, batch, WIDTH)).astype(np.float32)
    embedding, linear = cnorm.Embedding(w), cnorm.Linear(np.ascontiguousarray(w.T))
    ours, theirs = tape_of([embedding], steps, batch), tape_of([linear], steps, batch)
    x = tokens[..., None].astype(np.float32)
    assert run(ours, x).tobytes() == run(theirs, np.eye(7, dtype=np.float32)[tokens]).tobytes()
    dx = back(ours, dy, 1)
    back(theirs, dy, 7)
    assert not dx.any()
    found = own_gradients(embedding, ours)["weight"]
    assert found.tobytes() == np.ascontiguousarray(own_gradients(linear, theirs)["weight"].T).tobytes()
    wanted, sizes = np.zeros((7, WIDTH)), np.zeros((7, WIDTH))
    np.add.at(wanted, tokens, np.float64(dy))
    np.add.at(sizes, tokens, np.abs(np.float64(dy)))
    assert (np.abs(found - wanted) <= (16 + steps * batch / 16) * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("weights", ["float32", "int8", "float16"])
def test_files_and_states(weights, tmp_path, rng):
    model = language_model(rng, weights)
    x = ids(rng, 40)
    y = model.run(x)
    stream = model.stream()
    stream.process(x[:17])
    model.save(tmp_path / "m.safetensors")
    model.save_packed(tmp_path / "m.cnorm")
    others = [
        cnorm.load(tmp_path / "m.safetensors"),
        cnorm.load(tmp_path / "m.cnorm"),
        pickle.loads(pickle.dumps(model)),
    ]
    for other in others:
        assert other.identity == model.identity
        assert dict(other.tokens) == {0: TOKENS}
        assert other.run(x).tobytes() == y.tobytes()
        assert other.restore(stream.save()).process(x[17:]).tobytes() == y[17:].tobytes()


def test_ids_among_other_numbers(rng):
    model = mixed_model(rng)
    assert dict(model.tokens) == {4: 9, 1: 5}
    x = in_tokens(rng.standard_normal((30, 5)).astype(np.float32), model.tokens)
    first, second, linear = model.layers[1], model.layers[4], model.layers[-1]
    at = x.astype(int)
    parts = [first.weights["weight"][at[:, 4]], second.weights["weight"][at[:, 1]], x[:, 2:4]]
    assert model.run(x).tobytes() == cnorm.Model([linear]).run(np.concatenate(parts, axis=1)).tobytes()
    for element, bad in ((1, 5.0), (4, 9.0)):
        wrong = x.copy()
        wrong[20, element] = bad
        with pytest.raises(ValueError, match=rf"^x\[20, {element}\] must be a token id, an integer from 0 to "):
            model.run(wrong)


@pytest.mark.parametrize("bad", BAD)
def test_nothing_is_stepped_on_a_bad_id(bad, isa, rng):
    model = language_model(rng)
    x = ids(rng, 80)
    stream, streams = model.stream(), [model.stream() for _ in range(3)]
    stream.process(x[:5])
    saved = stream.save()
    wrong, out = x.copy(), np.full((80, 5), 7, np.float32)
    wrong[77] = bad
    message = (
        rf"^x\[77, 0\] must be a token id, an integer from 0 to 49, got {re.escape(repr(float(np.float32(bad))))}$"
    )
    with pytest.raises(ValueError, match=message):
        stream.process(wrong, out)
    with pytest.raises(ValueError, match=message):
        model.run(wrong)
    with pytest.raises(ValueError, match=r"^x\[0\] must be a token id"):
        stream.step(wrong[77])
    assert stream.save() == saved
    assert (out == 7).all()
    many = np.stack([x[:4], x[:4], x[:4]])
    many[1, 3] = bad
    with pytest.raises(ValueError, match=r"^x\[1, 3, 0\] must be a token id"):
        model.step_many(streams, many, reset=np.ones(3, bool))
    assert {one.save() for one in streams} == {model.stream().save()}
    tape = tape_of(list(model.layers), 4, 3)
    with pytest.raises(ValueError, match=r"^x\[3, 1, 0\] must be a token id"):
        run(tape, np.ascontiguousarray(many.swapaxes(0, 1)))


def test_a_learner_moves_the_rows_that_were_read(rng):
    model = language_model(rng)
    learner = cnorm.Learner(model, cnorm.SGD(0.5), truncate=4)
    x = ids(rng, 12)
    for frame in x[:8]:
        learner.step(frame)
    saved = learner.save()
    with pytest.raises(ValueError, match=r"^x\[0\] must be a token id"):
        learner.step(np.array([TOKENS], np.float32))
    assert learner.save() == saved
    for frame in x[8:]:
        learner.step(frame)
    learner.learn(loss="squared_error", target=np.ones((4, 5), np.float32))
    moved = (learner.model().layers[0].weights["weight"] != model.layers[0].weights["weight"]).any(axis=1)
    assert set(np.flatnonzero(moved)) == set(x[8:, 0].astype(int))


@pytest.mark.parametrize("count", [2, 6])
def test_a_bad_id_is_an_error_of_its_session_only(count, rng):
    model = language_model(rng)
    sessions, x = Sessions(model), ids(rng, count, 3)
    for i in range(count):
        sessions.open(str(i))
    x[1, 2] = 0.5
    results = sessions.process_many([(str(i), 0, x[i]) for i in range(count)])
    for i, y in enumerate(results):
        if i == 1:
            assert isinstance(y, ValueError)
            assert str(y).startswith("x[2, 0] must be a token id")
            assert sessions.checkpoint("1").frames == 0
        else:
            assert y.tobytes() == model.run(x[i]).tobytes()
    with pytest.raises(ValueError, match=r"^x\[2, 0\]"):
        sessions.process("1", 0, x[1])


def test_ids_must_be_elements_of_the_frame(rng):
    embedding, one = cnorm.Embedding(table(rng)), random_linear(rng, 3, 1)
    message = "an Embedding whose token ids are computed"
    with pytest.raises(ValueError, match=message):
        cnorm.Model([one, embedding])
    with pytest.raises(ValueError, match=message):
        cnorm.Model([cnorm.Linear(np.ones((1, 1), np.float32)), cnorm.Scale(np.ones(1, np.float32)), embedding])
    small = random_cell(("GRU", "torch"), rng, 3, 1)[0]
    both = cnorm.Bidirectional(small, small)
    with pytest.raises(ValueError, match=message):
        cnorm.Model([cnorm.Embedding(table(rng, 9, 3)), one, embedding])
    with pytest.raises(ValueError, match="must take the 2 outputs"):
        cnorm.Model([both, embedding])


def test_of_a_torch_module(rng):
    torch = pytest.importorskip("torch")
    module = torch.nn.Embedding(TOKENS, 6)
    layer = cnorm.Embedding(module)
    assert layer.weights["weight"].tobytes() == module.weight.detach().numpy().tobytes()
    whole = torch.nn.Sequential(module, torch.nn.GRU(6, 4))
    model, x = cnorm.Model(module), ids(rng, 9)
    expected = module(torch.from_numpy(x[:, 0].astype(np.int64))).detach().numpy()
    assert model.run(x).tobytes() == expected.tobytes()
    assert cnorm.Model(whole).check(x, whole(torch.from_numpy(x[:, 0].astype(np.int64)))[0].detach())
    with pytest.raises(ValueError, match="max_norm"):
        cnorm.Embedding(torch.nn.Embedding(3, 4, max_norm=1.0))


def test_refused_tables(rng):
    with pytest.raises(ValueError, match="shape"):
        cnorm.Embedding(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="at most 16777216 rows"):
        cnorm.Embedding(np.broadcast_to(np.float32(0), ((1 << 24) + 1, 1)))


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("form", ["step", "sequence"])
@pytest.mark.parametrize("weights", ["float32", "int8", "float16"])
def test_onnx_files_agree(weights, form, tmp_path, rng):
    """Cast and Gather; the file gives the model back."""
    onnx_export = pytest.importorskip("onnx_export")
    for make in (language_model, lambda rng, weights: mixed_model(rng).with_weights(weights, smallest=1)):
        model = make(rng, weights)
        path = tmp_path / "tokens.onnx"
        exported = onnx_export.export(model, path, form=form)
        assert {"Cast", "Gather"} <= {node.op_type for graph in _graphs(exported) for node in graph.node}
        report = onnx_export.check_parity(model, path, steps=20)
        assert report.ok, report
        assert onnx_export.load(path).identity == model.identity
    with pytest.raises(ValueError, match="float16 does not hold all token ids"):
        onnx_export.export(language_model(rng), dtype="float16")


def _graphs(exported):
    bodies = [a.g for node in exported.graph.node for a in node.attribute if a.name == "body"]
    return [exported.graph, *bodies]
