"""Every specimen of the gallery gives exactly what it says."""

import onnx_gallery as gallery
import pytest

from onnx_export.validation.examine import Options, examine


def examined(specimen, folder):
    path, options = gallery.lay_out(specimen, folder)
    return examine(str(path), Options(**options), lambda kind, value: None)


@pytest.mark.parametrize("build", gallery.SPECIMENS, ids=lambda build: build.__name__)
def test_specimen(build, tmp_path):
    specimen = build()
    report = examined(specimen, tmp_path)
    found = [("~" * bool(n.near_miss) + n.formula, n.verdict, n.blame) for n in report.norms]
    said = f"{[n.detail for n in report.norms]} {report.problem}"
    assert found == specimen.norms, said
    assert {f.code for f in report.findings if f.level != "note"} == specimen.findings
    assert report.exit_code() == specimen.exit_code, said


def test_there_are_enough_specimens():
    assert len(gallery.SPECIMENS) >= 40
