"""cnorm.hpp and cnorm_norms.hpp: objects that were moved from, errors, the norms, and the example in C++."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import cells
import models
import numpy as np
import pytest

import cnorm
import onnx_export

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "models"
PUBLIC = ROOT.parent / "shared" / "data" / "models" / "gtcrn_simple.onnx"
STATUS_OF = r"""
#include <cnorm.hpp>

template <class F> cnorm_status status_of(F f)
{
    try {
        f();
    } catch (const cnorm::error &error) {
        return error.status;
    }
    return CNORM_OK;
}
"""
PROGRAM = (
    STATUS_OF
    + r"""
#include <cassert>
#include <fstream>
#include <iterator>
#include <type_traits>

int main(int, char **arguments)
{
    static_assert(std::is_nothrow_move_constructible_v<cnorm::stream>);
    static_assert(std::is_nothrow_move_assignable_v<cnorm::stream>);
    static_assert(!std::is_copy_constructible_v<cnorm::stream>);
    float x[12] = {1}, y[9] = {0}, expected[9];
    cnorm::model model = cnorm::model::map(arguments[1]);
    cnorm::stream whole(model), first(model);
    whole.step(x, expected);
    whole.step(x, expected);
    first.step(x, y);
    cnorm::stream second = std::move(first);
    const auto use = [&] { first.step(x, y); };
    const auto save = [&] { (void)first.save(); };
    const auto restore = [&] { first.restore(x, sizeof x); };
    assert(status_of(use) == CNORM_ERROR_NULL && status_of(save) == CNORM_ERROR_NULL);
    assert(status_of(restore) == CNORM_ERROR_NULL);
    first.reset();
    const cnorm::model other = std::move(model);
    assert(model.inputs() == 12 && other.inputs() == 12);
    second.step(x, y);
    for (int i = 0; i < 9; ++i) assert(y[i] == expected[i]);
    first = std::move(second);
    first.reset();
    first.step(x, y);
    assert(first.frames() == 1 && status_of([&] { second.step(x, y); }) == CNORM_ERROR_NULL);
    for (const char *path : {"/", "/no such file"}) {
        try {
            (void)cnorm::model::map(path);
            assert(false);
        } catch (const std::system_error &error) {
            assert(error.code() == (path[1] ? std::errc::no_such_file_or_directory : std::errc::is_a_directory));
        }
    }
    assert(status_of([&] { (void)cnorm::model::map(arguments[0]); }) == CNORM_ERROR_FORMAT);
    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<char> bytes(1, 0); // so that the model lies at an odd address
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(file), {});
    const char *odd = bytes.data() + 1;
    const auto size = static_cast<std::ptrdiff_t>(bytes.size() - 1);
    assert(status_of([&] { (void)cnorm::model::of(odd, size); }) == CNORM_ERROR_ALIGN);
    assert(status_of([&] { (void)cnorm::model::copy(odd, size - 1); }) == CNORM_ERROR_DAMAGED);
    assert(status_of([&] { (void)cnorm::model::copy(nullptr, 0); }) != CNORM_OK);
    cnorm::stream of_copy(cnorm::model::copy(odd, size));
    bytes.assign(bytes.size(), 0);
    of_copy.step(x, y);
    of_copy.step(x, y);
    for (int i = 0; i < 9; ++i) assert(y[i] == expected[i]);
}
"""
)


NORMS = (
    STATUS_OF
    + r"""
#include <cnorm_norms.hpp>
#include <array>
#include <cassert>
#include <cmath>

enum { ROWS = 3, N = 8 };
template <class T> using rows = std::vector<T>;

// y and the gradients of C++ in `got`, of C in `want`
template <class T> struct results {
    rows<T> y, sum, dx;
    rows<cnorm::compute<T>> stats, dgain, dbias;
    results() : y(ROWS * N), sum(ROWS * N), dx(ROWS * N), stats(3 * ROWS * N), dgain(N), dbias(N) {}
    bool operator==(const results &other) const
    {
        const auto same = [](const auto &a, const auto &b) {
            return std::memcmp(a.data(), b.data(), a.size() * sizeof *a.data()) == 0;
        };
        return same(y, other.y) && same(sum, other.sum) && same(dx, other.dx) && same(stats, other.stats) &&
               same(dgain, other.dgain) && same(dbias, other.dbias);
    }
};

template <class T> void fill(T &x, int i) { x = static_cast<T>(std::sin(i)); }
void fill(cnorm::float16 &x, int i) { x.bits = static_cast<std::uint16_t>(0x3c00 + 37 * (i % 11)); }
void fill(cnorm::bfloat16 &x, int i) { x.bits = static_cast<std::uint16_t>(0x3f80 + 3 * (i % 11)); }

template <class T> void compare()
{
    using C = cnorm::compute<T>;
    constexpr cnorm_dtype dtype = cnorm::element<T>::dtype;
    rows<T> x(ROWS * N), dy(ROWS * N);
    rows<C> gain(N), bias(N), var(N, 2), partials(4096);
    std::vector<double> moments(2 * N), want_moments(2 * N), scratch(1 << 16);
    for (int i = 0; i < ROWS * N; ++i) fill(x[i], i), fill(dy[i], 100 + i);
    for (int i = 0; i < N; ++i) fill(gain[i], 7 + i), fill(bias[i], 50 + i);
    {
        results<T> got, want;
        cnorm::norm<T> call;
        cnorm_norm c{};
        c.rows = ROWS, c.n = N, c.x = x.data(), c.gain = gain.data(), c.bias = bias.data(), c.eps = 1e-5;
        c.y = want.y.data(), c.stats = want.stats.data(), c.residual = dy.data(), c.sum = want.sum.data();
        call.x = x, call.gain = gain, call.bias = bias, call.y = got.y, call.residual = dy, call.sum = got.sum;
        call.stats = cnorm::span<C>(got.stats.data(), 3 * ROWS);
        cnorm::rms_norm(call), cnorm::check(cnorm_rms_norm(dtype, &c), "C");
        assert(got == want);
        cnorm::add_layer_norm(call), cnorm::check(cnorm_add_layer_norm(dtype, &c), "C");
        assert(got == want);
        cnorm::layer_norm(call), cnorm::check(cnorm_layer_norm(dtype, &c), "C");
        assert(got == want);
        cnorm::norm_backward<T> back;
        cnorm_norm_backward b{};
        b.rows = ROWS, b.n = N, b.dy = dy.data(), b.x = x.data(), b.gain = gain.data(), b.stats = want.stats.data();
        b.dx = want.dx.data(), b.dgain = want.dgain.data(), b.dbias = want.dbias.data(), b.partials = partials.data();
        back.dy = dy, back.x = x, back.gain = gain, back.stats = call.stats;
        back.dx = got.dx, back.dgain = got.dgain, back.dbias = got.dbias;
        cnorm::layer_norm_backward(back), cnorm::check(cnorm_layer_norm_backward(dtype, &b), "C");
        assert(got == want);
        cnorm::rms_norm_backward(back), cnorm::check(cnorm_rms_norm_backward(dtype, &b), "C");
        assert(got == want);
        call.y = cnorm::span<T>(got.y.data(), N);
        assert(status_of([&] { cnorm::layer_norm(call); }) == CNORM_ERROR_SIZE);
        call.y = got.y, call.gain = {}, call.n = 5;
        assert(status_of([&] { cnorm::layer_norm(call); }) == CNORM_ERROR_SIZE);
        call.n = N, call.eps = -1;
        assert(status_of([&] { cnorm::layer_norm(call); }) == CNORM_ERROR_EPS);
        call = {};
        assert(status_of([&] { cnorm::layer_norm(call); }) == CNORM_ERROR_SIZE);
    }
    enum { CHANNELS = 4, GROUPS = 2 };
    results<T> got, want;
    cnorm::volume_norm<T> call;
    cnorm_volume_norm c{};
    const auto of_channels = [](rows<C> &all) { return cnorm::span<C>(all.data(), CHANNELS); };
    c.samples = ROWS, c.channels = CHANNELS, c.space = N / CHANNELS, c.groups = GROUPS;
    c.x = x.data(), c.gain = gain.data(), c.bias = bias.data(), c.mean = bias.data(), c.var = var.data();
    c.eps = 1e-5, c.y = want.y.data(), c.stats = want.stats.data(), c.moments = want_moments.data();
    c.scratch = scratch.data();
    call.samples = ROWS, call.channels = CHANNELS, call.groups = GROUPS, call.x = x, call.y = got.y;
    call.gain = of_channels(gain), call.bias = of_channels(bias);
    call.mean = of_channels(bias), call.var = of_channels(var);
    cnorm::volume_norm_backward<T> back;
    cnorm_volume_norm_backward b{};
    b.samples = ROWS, b.channels = CHANNELS, b.space = N / CHANNELS, b.groups = GROUPS;
    b.dy = dy.data(), b.x = x.data(), b.gain = gain.data(), b.stats = want.stats.data(), b.mean = bias.data();
    b.var = var.data(), b.eps = 1e-5, b.dx = want.dx.data();
    b.dgain = want.dgain.data(), b.dbias = want.dbias.data(), b.scratch = scratch.data();
    back.samples = ROWS, back.channels = CHANNELS, back.groups = GROUPS, back.dy = dy, back.x = x, back.dx = got.dx;
    back.gain = call.gain, back.mean = call.mean, back.var = call.var;
    back.dgain = of_channels(got.dgain), back.dbias = of_channels(got.dbias);
    back.stats = call.stats = cnorm::span<C>(got.stats.data(), 3 * ROWS * GROUPS);
    cnorm::group_norm(call), cnorm::check(cnorm_group_norm(dtype, &c), "C");
    cnorm::group_norm_backward(back), cnorm::check(cnorm_group_norm_backward(dtype, &b), "C");
    assert(got == want);
    back.stats = call.stats = cnorm::span<C>(got.stats.data(), 3 * CHANNELS);
    call.moments = cnorm::span<double>(moments.data(), 2 * CHANNELS);
    cnorm::batch_norm(call), cnorm::check(cnorm_batch_norm(dtype, &c), "C");
    cnorm::batch_norm_backward(back), cnorm::check(cnorm_batch_norm_backward(dtype, &b), "C");
    assert(got == want && moments == want_moments && moments[CHANNELS] > 0);
    cnorm::batch_norm_inference(call), cnorm::check(cnorm_batch_norm_inference(dtype, &c), "C");
    cnorm::batch_norm_inference_backward(back), cnorm::check(cnorm_batch_norm_inference_backward(dtype, &b), "C");
    assert(got == want);
    call.gain = gain; // of N elements, not of CHANNELS
    assert(status_of([&] { cnorm::group_norm(call); }) == CNORM_ERROR_SIZE);
    call.samples = 0;
    assert(status_of([&] { cnorm::group_norm(call); }) == CNORM_ERROR_SIZE);
}

template <class T> void compare_whole() // those of float and double
{
    rows<T> x(ROWS * N), dy(ROWS * N), gain(N, 3), lengths(ROWS, 2), scratch(1024);
    for (int i = 0; i < ROWS * N; ++i) fill(x[i], i), fill(dy[i], 100 + i);
    results<T> got, want;
    constexpr cnorm_dtype dtype = cnorm::element<T>::dtype;
    cnorm_weight w{};
    w.rows = ROWS, w.n = N, w.dv = dy.data(), w.w = x.data(), w.gain = lengths.data(), w.out = want.y.data();
    w.dgain = want.dgain.data();
    cnorm::weight<T> call;
    call.n = N, call.dv = dy, call.w = x, call.gain = lengths, call.out = got.y;
    call.dgain = cnorm::span<T>(got.dgain.data(), ROWS);
    cnorm::weight_norm(call), cnorm::check(cnorm_weight_norm(dtype, &w), "C");
    assert(got == want && got.y[1] != x[1]);
    cnorm::weight_norm_backward(call), cnorm::check(cnorm_weight_norm_backward(dtype, &w), "C");
    assert(got == want && got.dgain[0] != 0);
    call.n = N - 1;
    assert(status_of([&] { cnorm::weight_norm(call); }) == CNORM_ERROR_SIZE);
    double dsigma = 0, want_dsigma = 1;
    cnorm_divisive d{};
    d.rows = ROWS, d.n = N, d.mean_radius = N, d.radius = 2, d.dy = dy.data(), d.x = x.data(), d.gain = gain.data();
    d.bias = gain.data(), d.sigma = 1, d.out = want.y.data(), d.dgain = want.dgain.data(), d.dbias = want.dbias.data();
    d.dsigma = &want_dsigma, d.scratch = scratch.data();
    cnorm::divisive<T> fields;
    fields.radius = 2, fields.dy = dy, fields.x = x, fields.gain = gain, fields.bias = gain, fields.out = got.y;
    fields.dgain = got.dgain, fields.dbias = got.dbias, fields.dsigma = &dsigma;
    cnorm::divisive_norm(fields), cnorm::check(cnorm_divisive_norm(dtype, &d), "C");
    assert(got == want);
    cnorm::divisive_norm_backward(fields), cnorm::check(cnorm_divisive_norm_backward(dtype, &d), "C");
    assert(got == want && dsigma == want_dsigma);
    fields.dsigma = nullptr;
    assert(status_of([&] { cnorm::divisive_norm_backward(fields); }) == CNORM_ERROR_NULL);
}

int main()
{
    compare<float>();
    compare<double>();
    compare_whole<float>();
    compare_whole<double>();
    compare<cnorm::float16>();
    compare<cnorm::bfloat16>();
    const std::array<float, 3> x{1, 2, 4}; // containers and arrays are spans
    float y[3];
    cnorm::norm<float> call;
    call.x = x, call.y = y;
    cnorm::layer_norm(call);
    assert(y[0] < y[1] && y[1] < y[2]);
}
"""
)


FLAGS = pytest.mark.parametrize("flags", [[], ["-fsanitize=address,undefined"]], ids=["plain", "sanitized"])


def compiled(source, out, flags):
    """A program of C++ with the objects of the build."""
    objects = sorted((ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}" / "src").rglob("*.o"))
    assert objects, "build the project first"
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", *flags]
    command += [f"-I{ROOT / 'src' / 'include'}", source, *objects, "-lm", "-o", out]
    subprocess.run(command, check=True)
    return out


@pytest.mark.exhaustive(one_in=4)
@FLAGS
@pytest.mark.parametrize("program", [PROGRAM, NORMS], ids=["streams", "norms"])
def test_programs(program, flags, tmp_path):
    cnorm.demo_model().save_packed(tmp_path / "demo.cnorm")
    (tmp_path / "program.cpp").write_text(program)
    subprocess.run(
        [compiled(tmp_path / "program.cpp", tmp_path / "program", flags), tmp_path / "demo.cnorm"], check=True
    )


@pytest.fixture
def example(monkeypatch):
    """The module of examples/models by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module


def spectral_model(path, rng):
    """A model between spectra of 257 frequencies, packed: what is noise to it fades, what is not stays."""
    gru = cnorm.GRU(cells.random_weights(cnorm.PRESETS["GRU", "torch"], rng, 514, 16), preset="torch")
    gates = [gru, models.random_linear(rng, 16, 514), cnorm.Activation("sigmoid"), cnorm.Multiply("input")]
    cnorm.Model(gates).save_packed(path)
    return path


@pytest.mark.exhaustive(one_in=2)
@FLAGS
def test_denoise(flags, example, tmp_path, rng):
    """The samples of denoise.py but for the rounding of the transforms, and Python's bits; in pieces the same."""
    denoise, audio = example("denoise"), example("audio")
    path = spectral_model(tmp_path / "m.cnorm", rng)
    if PUBLIC.exists() and not flags:
        path = tmp_path / "gtcrn.cnorm"
        onnx_export.load(PUBLIC, check=False).save_packed(path)
    program = compiled(EXAMPLES / "denoise.cpp", tmp_path / "denoise", flags)
    noisy = 0.2 * rng.standard_normal(40 * denoise.HOP + 100).astype(np.float32)
    first = 17 * denoise.HOP
    for name, samples in {"whole": noisy, "a": noisy[:first], "b": noisy[first:]}.items():
        audio.write_wav(tmp_path / f"{name}.wav", samples, denoise.RATE)
        files = [f"{name}.wav", f"{name}_out.wav", "whole_state" if name == "whole" else "state"]
        subprocess.run([program, path, *files, f"{name}_frames"], cwd=tmp_path, check=True)
    x, y = np.fromfile(tmp_path / "whole_frames", "<f4").reshape(40, 2, 514).swapaxes(0, 1)
    stream = cnorm.load(path).stream()
    np.testing.assert_array_equal(stream.process(x), y)
    assert (tmp_path / "whole_state").read_bytes().startswith(stream.save())
    whole, *pieces = (audio.read_wav(tmp_path / f"{name}_out.wav", denoise.RATE) for name in ("whole", "a", "b"))
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert (tmp_path / "whole_state").read_bytes() == (tmp_path / "state").read_bytes()
    _, expected = denoise.denoise(denoise.Denoiser(path), audio.read_wav(tmp_path / "whole.wav", denoise.RATE))
    audio.write_wav(tmp_path / "expected.wav", expected, denoise.RATE)
    off = audio.read_wav(tmp_path / "expected.wav", denoise.RATE) - whole
    assert np.abs(off).max() <= 1 / 32768  # both cut off what is less than a step of 16 bits
    assert np.abs(whole).max() > 0.01


@pytest.mark.exhaustive(one_in=2)
@FLAGS
def test_denoise_refuses(flags, example, tmp_path, rng):
    """Files that are cut off or of another kind, and states of another model."""
    audio = example("audio")
    program = compiled(EXAMPLES / "denoise.cpp", tmp_path / "denoise", flags)
    path = spectral_model(tmp_path / "m.cnorm", rng)
    audio.write_wav(tmp_path / "in.wav", np.zeros(1000), 16000)
    audio.write_wav(tmp_path / "slow.wav", np.zeros(1000), 8000)
    for size in (0, 3, 13, 30):
        (tmp_path / f"{size}.wav").write_bytes((tmp_path / "in.wav").read_bytes()[:size])
    cnorm.demo_model().save_packed(tmp_path / "demo.cnorm")
    (tmp_path / "short").write_bytes(bytes(100))
    (tmp_path / "other").write_bytes(cnorm.demo_model().stream().save() + bytes(4096))
    right = [path, "in.wav", "out.wav"]
    for arguments, says in (
        ([path, "slow.wav", "out.wav"], "16000 Hz and 16 bits are wanted"),
        *(([path, f"{size}.wav", "out.wav"], "no WAV file" if size < 12 else "no samples") for size in (0, 3, 13, 30)),
        (["demo.cnorm", "in.wav", "out.wav"], "514 inputs and outputs"),
        (["in.wav", "in.wav", "out.wav"], "not a packed model"),
        ([*right, "short"], "the state is too short"),
        ([*right, "other"], "restore: "),
        ([path], "usage: "),
    ):
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done
        assert re.search(says, done.stderr), done.stderr
    assert not (tmp_path / "out.wav").exists()
    subprocess.run([program, *right], cwd=tmp_path, check=True)
