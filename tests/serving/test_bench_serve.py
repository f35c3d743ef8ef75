"""`cnorm bench --serve`: what it sends and counts. No test compares times."""

import io

import numpy as np
import pytest

import cnorm

pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from cnorm_bench import measure_serving


@pytest.fixture(scope="module")
def document():
    return measure_serving.serving([(50, 3, (2,))], seconds=0.5)


@pytest.mark.exhaustive
def test_every_message_is_answered_with_the_right_bits(document):
    assert {r["engine"] for r in document["records"]} >= {"cnorm", "transport alone"}
    for record in document["records"]:
        assert (record["sent"], record["unanswered"], record["wrong"]) == (20, 0, 0)
        assert 0 < record["p50"] <= record["p99"] <= record["p99.9"]
        assert record["mib"] > 1


@pytest.mark.exhaustive
def test_times_of_messages_and_engines(document):
    engines = {r["engine"] for r in document["records"]}
    assert {(r["engine"], r["steps"]) for r in document["messages"]} == {(engine, 3) for engine in engines}
    assert all(0 < r["least"] <= r["microseconds"] for r in document["messages"])
    assert {r["engine"] for r in document["alone"]} == engines - {"transport alone"}
    assert {r["sessions"] for r in document["alone"]} == set(measure_serving.TOGETHER)
    assert all(r["microseconds"] > 0 for r in document["alone"])


@pytest.mark.exhaustive
def test_tables_and_picture(document):
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    measure_serving.serving_tables(console, document)
    assert "CPU time of a message" in console.file.getvalue()
    assert "0 wrong" in console.file.getvalue()
    pytest.importorskip("matplotlib")
    drawing = io.BytesIO()
    measure_serving.serving_picture(document, drawing)
    assert drawing.getvalue().startswith(b"\x89PNG")


def test_the_most_sessions_in_time():
    records = [
        {"engine": "a", "period_ms": 20, "steps": steps, "sessions": n, "p99": p99, "unanswered": lost}
        for steps, n, p99, lost in [
            (1, 10, 5.0, 0),
            (1, 20, 19.0, 0),
            (1, 30, 15.0, 1),
            (1, 40, 21.0, 0),
            (2, 50, 9, 0),
        ]
    ]
    assert measure_serving.most({"records": records}, "a", 20, 1) == 20
    assert measure_serving.most({"records": records}, "a", 20, 2) == 50
    assert measure_serving.most({"records": records}, "b", 20, 1) == 0


@pytest.mark.exhaustive
def test_a_model_of_a_file_is_measured(tmp_path):
    path = tmp_path / "one.safetensors"
    layer = cnorm.Linear(np.eye(3, 5, dtype=np.float32))
    cnorm.Model([layer]).save(path)
    document = measure_serving.serving([(50, 2, (2,))], model=str(path), seconds=0.2)
    assert document["model"] == str(path)
    assert all((record["unanswered"], record["wrong"]) == (0, 0) for record in document["records"])
