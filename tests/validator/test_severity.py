"""Errors versus notes: the exit code of a sound model depends on the model alone."""

import os

import gallery
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnx_export import validate
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options


def examined(model, tmp_path, **options):
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return examine(str(path), Options(**options), lambda *_: None)


def post_norm_block(width, decomposed):
    """A residual addition before each norm, which onnxruntime fuses into SkipLayerNormalization."""
    constants, nodes, x = {}, [], "x"
    weight = np.random.default_rng(3).normal(0, width**-0.5, (width, width)).astype(np.float32)
    constants["w"] = weight
    for layer in range(3):
        y = "y" if layer == 2 else f"h{layer}"
        nodes += [gallery.node("MatMul", f"{x} w", f"m{layer}"), gallery.node("Add", f"{x} m{layer}", f"s{layer}")]
        if decomposed:
            more, stored = gallery.decomposed(x=f"s{layer}", y=y, prefix=f"p{layer}_", width=width)
            nodes += more
            constants |= stored
        else:
            nodes.append(gallery.native(f"s{layer}", y, f"scale{layer}", f"bias{layer}"))
            constants |= {f"{k}{layer}": v for k, v in gallery.weights(width).items()}
        x = y
    return gallery.model(nodes, ("batch", "time", width), constants)


@pytest.mark.exhaustive
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("width", [64, 256])
def test_a_sound_transformer_passes_whatever_the_seed_and_sizes(decomposed, width, tmp_path):
    model = post_norm_block(width, decomposed)
    codes = {}
    for seed in range(3):
        for batch, dim in ((1, 4), (2, 16), (4, 33)):
            report = examined(model, tmp_path, seed=seed, batch=batch, dim=dim)
            codes[seed, batch, dim] = report.exit_code(strict=True)
    assert set(codes.values()) == {0}, codes


def test_rows_with_outliers_of_a_hundred_deviations_pass(tmp_path):
    """Conditioning up to 100, as in the residual streams of trained transformers."""
    model = post_norm_block(256, False)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(2, 8, 256))
    x[..., 7] *= 60
    x[..., 100] -= 90
    np.savez(tmp_path / "x.npz", x=x.astype(np.float32))
    report = examined(model, tmp_path, input=str(tmp_path / "x.npz"))
    assert report.norms[0].conditioning > 10
    assert report.exit_code(strict=True) == 0


def test_advised_optimiser_setting_keeps_the_operator(tmp_path):
    """With the optimiser setting that the note advises, onnxruntime keeps the file's operator."""
    import onnxruntime

    model = post_norm_block(64, False)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "out.onnx")
    for disabled, expected in (([], "SkipLayerNormalization"), (["SkipLayerNormFusion"], "LayerNormalization")):
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
        assert expected in {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}


def test_a_fractional_exponent_fails(tmp_path):
    built = gallery.model(*gallery.parts(gallery.decomposed(power=1.99)))
    report = examined(built, tmp_path)
    assert {f.level for f in report.findings if f.code in ("near-miss", "nan")} == {"error"}
    assert report.exit_code() == 1


@pytest.mark.parametrize("power", [4.0, 6.0])
def test_an_even_exponent_is_a_warning(power, tmp_path):
    built = gallery.model(*gallery.parts(gallery.decomposed(power=power, affine=False)))
    report = examined(built, tmp_path)
    assert [f.level for f in report.findings if f.code == "near-miss"] == ["warning"]


def test_nan_at_the_norm_from_given_finite_inputs_is_an_error(tmp_path):
    model = gallery.model([gallery.node("Log", "x", "h"), gallery.native("h")], constants=gallery.weights())
    report = examined(model, tmp_path)
    (finding,) = [f for f in report.findings if f.code == "non-finite"]
    assert finding.level == "warning"
    assert "generated inputs: ['x']" in finding.message
    np.savez(tmp_path / "x.npz", **gallery.rows(0))
    report = examined(model, tmp_path, input=str(tmp_path / "x.npz"))
    (finding,) = [f for f in report.findings if f.code == "non-finite"]
    assert finding.level == "error"
    assert report.exit_code() == 1


def test_a_norm_that_makes_nan_of_finite_rows_fails(tmp_path):
    """The square root of a negative number: eps is subtracted."""
    built = gallery.model(*gallery.parts(gallery.decomposed(eps=-2.0)))
    report = examined(built, tmp_path)
    assert report.exit_code() == 1


# ------------------------------------------------------------------------------------------ external data files


def split(folder, location):
    """A model whose scale is stored in a file beside it."""
    model = gallery.native_layer_norm().model
    tensor = model.graph.initializer[0]
    (folder / "weights").write_bytes(numpy_helper.to_array(tensor).tobytes())
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    return folder / "weights"


@pytest.mark.parametrize("location", ["net.onnx.data", "net.data"])
def test_external_data_with_the_models_name_is_read_and_reported(location, tmp_path):
    split(tmp_path, location).rename(tmp_path / location)
    report = validate(tmp_path / "net.onnx")
    assert report.exit_code(strict=True) == 0, report.problem
    (note,) = [f for f in report.findings if f.code == "data-file"]
    assert repr(location) in note.message


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("kind", ["other name", "hard link", "link out", "pipe"])
def test_external_data_of_another_name_or_kind_is_refused(kind, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    location = "other.data" if kind == "other name" else "net.onnx.data"
    data = split(folder, location)
    if kind == "hard link":
        os.link(data, folder / location)
    elif kind == "link out":
        (folder / location).symlink_to(data.rename(tmp_path / "weights"))
    elif kind == "pipe":
        os.mkfifo(folder / location)
    else:
        data.rename(folder / location)
    assert validate(folder / "net.onnx").exit_code() == 3


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_pytorchs_default_export_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.onnx.export(torch.nn.LayerNorm(16).eval(), (torch.randn(2, 16),), tmp_path / "m.onnx", verbose=False)
    report = validate(tmp_path / "m.onnx")
    assert report.exit_code() == 0
    assert [norm.verdict for norm in report.norms] == ["ok"]
