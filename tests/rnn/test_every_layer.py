"""A model with each kind of layer: one hash of its outputs, and its streams and saved states in C and C++."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cells import random_weights
from models import frame_layers, streamed_layers, token_model

import cnorm
import onnx_export
from cnorm.layers import KINDS
from cnorm.layers.embedding import in_tokens

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "every_layer.json"
PUBLIC = ROOT.parent / "shared" / "data" / "models"  # public weight files, see docs/models.md
WEIGHTS = ("float32", "int8", "float16")
FRAMES = 90  # more than are computed together
HALF = 41

PROGRAM_C = """\
#define CNORM_MAP
#include "cnorm.h"
#include "cnorm_map.h"
#include "cnorm_model.h"

#include <stdio.h>
#include <stdlib.h>

static void check(int ok, const char *what)
{
    if (!ok) fprintf(stderr, "%s\\n", what), exit(1);
}
static void *allocate(ptrdiff_t bytes)
{
    return aligned_alloc(CNORM_ALIGN, ((size_t)bytes / CNORM_ALIGN + 1) * CNORM_ALIGN);
}

int main(int argc, char **argv)
{
    check(argc == 3, "MODEL SAVED < FRAMES > OUTPUTS and the state");
    ptrdiff_t bytes;
    const void *file = cnorm_map(argv[1], &bytes);
    check(file != NULL, argv[1]);
    const ptrdiff_t needed = cnorm_model_memory(file, bytes);
    void *memory = allocate(needed);
    cnorm_model model;
    check(cnorm_model_open(file, bytes, memory, needed, &model, NULL) == CNORM_OK, "open");
    cnorm_stream stream;
    float *floats = allocate(4 * cnorm_stream_floats(&model, 1));
    check(cnorm_stream_start(&stream, &model, floats, 1) == CNORM_OK, "start");
    const ptrdiff_t size = cnorm_stream_saved_bytes(&model);
    unsigned char *saved = allocate(size);
    FILE *state = fopen(argv[2], "rb");
    check(state && fread(saved, 1, (size_t)size, state) == (size_t)size, argv[2]);
    fclose(state);
    check(cnorm_stream_restore(&stream, saved, size) == CNORM_OK, "restore");
    float *x = allocate(4 * model.inputs), *y = allocate(4 * model.outputs);
    while (fread(x, 4, (size_t)model.inputs, stdin) == (size_t)model.inputs) {
        check(cnorm_stream_run(&stream, 1, x, y) == CNORM_OK, "step");
        fwrite(y, 4, (size_t)model.outputs, stdout);
    }
    check(cnorm_stream_save(&stream, saved) == CNORM_OK, "save");
    fwrite(saved, 1, (size_t)size, stdout);
    free(y), free(x), free(saved), free(floats), free(memory);
    cnorm_unmap(file, bytes);
    return 0;
}
"""

PROGRAM_CPP = """\
#include "cnorm.hpp"

#include <cstdio>
#include <fstream>
#include <iterator>

int main(int, char **argv)
{
    cnorm::stream stream(cnorm::model::map(argv[1]));
    std::ifstream file(argv[2], std::ios::binary);
    const std::vector<char> saved((std::istreambuf_iterator<char>(file)), {});
    stream.restore(saved.data(), static_cast<std::ptrdiff_t>(saved.size()));
    const cnorm::model model = cnorm::model::map(argv[1]);
    std::vector<float> x(model.inputs()), y(model.outputs());
    while (std::fread(x.data(), 4, x.size(), stdin) == x.size()) {
        stream.step(x.data(), y.data());
        std::fwrite(y.data(), 4, y.size(), stdout);
    }
    const auto state = stream.save();
    std::fwrite(state.data(), 1, state.size(), stdout);
}
"""

PYTHON = """\
import sys
import numpy as np, cnorm
model = cnorm.load(sys.argv[1])
stream = model.restore(open(sys.argv[2], "rb").read())
x = np.frombuffer(sys.stdin.buffer.read(), np.float32).reshape(-1, model.input_size)
sys.stdout.buffer.write(b"".join(stream.step(frame).tobytes() for frame in x) + stream.save())
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Commands that restore a stream, run frames and save it: another process, C and C++."""
    folder = tmp_path_factory.mktemp("programs")
    objects = sorted((ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}" / "src").rglob("*.o"))
    assert objects, "build the project first"
    commands = {"Python": [sys.executable, "-P", "-c", PYTHON]}
    for language, compiler, source in (("c", ["cc"], PROGRAM_C), ("cpp", ["c++", "-std=c++17"], PROGRAM_CPP)):
        path = folder / f"restored.{language}"
        path.write_text(source)
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'src' / 'include'}"]
        output = folder / f"restored_{language}"
        subprocess.run([*compiler, *flags, path, *objects, "-lm", "-o", output], check=True)
        commands[language] = [output]
    return commands


def whole_model(rng, weights="float32"):
    model = cnorm.Model(streamed_layers(rng), ("scaled", "last"))
    return model.with_weights(weights, smallest=1)


def tokens_model(rng, weights="float32"):
    return token_model(rng).with_weights(weights, smallest=1)


def frames_model(rng, weights="float32"):
    return cnorm.Model(frame_layers(rng)).with_weights(weights, smallest=1)


def public_model(rng, name):
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"SKIPPED LOUDLY: {name} is not in {PUBLIC}")
    return onnx_export.load(path, **{"inputs": {"sr": 16000}, "dims": {"sequence": 576}} if "silero" in name else {})


def kinds(layers):
    return {layer.kind for layer in layers}.union(*(kinds(layer.inner().values()) for layer in layers))


def test_the_model_has_each_kind_that_streams(rng):
    lists = streamed_layers(rng), token_model(rng).layers, frame_layers(rng)
    assert kinds([layer for layers in lists for layer in layers]) | {"Bidirectional"} == set(KINDS)


def test_the_longest_sum_of_each_kind():
    one = cnorm.LSTM(random_weights(cnorm.PRESETS["LSTM", "torch"], np.random.default_rng(1), 5, 6, 3), preset="torch")
    ones = np.ones((6, 70), np.float32)
    taps = np.ones((4, 2, 3), np.float32)
    found = {
        "LSTM": (one, 6),
        "Linear": (cnorm.Linear(ones), 70),
        "CausalConv1d": (cnorm.CausalConv1d(taps, groups=2), 6),
        "depthwise": (cnorm.CausalConv1d(taps[:, :1], groups=4), 3),
        "Embedding": (cnorm.Embedding(ones), 1),
        "Scale": (cnorm.Scale(ones[0]), 1),
    }
    assert {name: layer.longest_sum() for name, (layer, _) in found.items()} == {n: s for n, (_, s) in found.items()}


def test_one_hash_on_every_instruction_set(rng):
    """Outputs and the state after a free run."""
    before, found = cnorm.active_isa(), {}
    for weights in WEIGHTS:
        model, hashes = whole_model(np.random.default_rng(19), weights), set()
        x = np.random.default_rng(1).standard_normal((FRAMES, model.input_size)).astype(np.float32)
        try:
            for isa in cnorm.available_isas():
                cnorm.use_isa(isa)
                stream = model.stream()
                bits = stream.process(x).tobytes() + b"".join(one.tobytes() for one in stream.state().values())
                hashes.add(hashlib.sha256(bits).hexdigest()[:16])
        finally:
            cnorm.use_isa(before)
        assert len(hashes) == 1, weights
        found[weights] = hashes.pop()
    if not GOLDEN.exists():  # deleted by hand, to record an intended change of results
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_path_has_the_same_bits(weights, isa, rng):
    model = whole_model(rng, weights)
    x = rng.standard_normal((FRAMES, model.input_size)).astype(np.float32)
    y = model.run(x)
    stream, streams = model.stream(), [model.stream() for _ in range(3)]
    assert np.stack([stream.step(frame) for frame in x]).tobytes() == y.tobytes()
    many = np.stack([model.step_many(streams, np.stack([frame] * 3)) for frame in x])
    assert all(many[:, i].tobytes() == y.tobytes() for i in range(3))


CASES = [
    *((f"layers in {weights}", whole_model, weights) for weights in WEIGHTS),
    *((f"tokens in {weights}", tokens_model, weights) for weights in WEIGHTS),
    *((f"frames in {weights}", frames_model, weights) for weights in WEIGHTS),
    *((name, public_model, name) for name in ("dtln_1.onnx", "silero_16k_op15.onnx", "gtcrn_simple.onnx")),
]


@pytest.mark.exhaustive(one_in=15)
@pytest.mark.parametrize(("make", "argument"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_state_moves_to_other_processes_and_languages(make, argument, programs, tmp_path, rng):
    model = make(rng, argument)
    x = in_tokens(rng.standard_normal((FRAMES, model.input_size)).astype(np.float32), model.tokens)
    stream = model.stream()
    stream.process(x[:HALF])
    (tmp_path / "saved").write_bytes(stream.save())
    model.save_packed(tmp_path / "model.cnorm")
    expected = stream.process(x[HALF:]).tobytes() + stream.save()
    for language, command in programs.items():
        arguments = [*command, tmp_path / "model.cnorm", tmp_path / "saved"]
        done = subprocess.run(arguments, input=x[HALF:].tobytes(), stdout=subprocess.PIPE, check=True)
        assert done.stdout == expected, language
