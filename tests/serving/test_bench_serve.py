"""`cnorm bench --serve`: what it sends and counts. No test compares times."""

import io

import pytest

pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from cnorm.tools.bench import measure_serving


@pytest.fixture(scope="module")
def document():
    return measure_serving.serving([(50, 3, (2,))], seconds=0.5)


def test_every_message_is_answered_with_the_right_bits(document):
    assert {r["engine"] for r in document["records"]} >= {"cnorm", "transport alone"}
    for record in document["records"]:
        assert (record["sent"], record["unanswered"], record["wrong"]) == (20, 0, 0)
        assert 0 < record["p50"] <= record["p99"] <= record["p99.9"]
        assert record["mib"] > 1


def test_tables_and_picture(document):
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    measure_serving.serving_tables(console, document)
    assert "0 wrong" in console.file.getvalue()
    pytest.importorskip("matplotlib")
    drawing = io.BytesIO()
    measure_serving.serving_picture(document, drawing)
    assert drawing.getvalue().startswith(b"\x89PNG")


def test_the_most_sessions_in_time():
    records = [
        {"engine": "a", "period_ms": 20, "sessions": n, "p99": p99, "unanswered": lost}
        for n, p99, lost in [(10, 5.0, 0), (20, 19.0, 0), (30, 15.0, 1), (40, 21.0, 0)]
    ]
    assert measure_serving.most({"records": records}, "a", 20) == 20
    assert measure_serving.most({"records": records}, "b", 20) == 0
