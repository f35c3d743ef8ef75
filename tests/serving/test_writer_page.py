"""The page that writes by hand, `examples/paper/writer_page.py`: what its server refuses, and in headless Chromium."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

FOLDER = Path(__file__).parents[2] / "examples" / "paper"


@pytest.fixture(scope="module")
def page():
    """Address of the page."""
    command = [sys.executable, FOLDER / "writer_page.py", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().removeprefix("open ").strip()
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import writer

    return writer


def asked(page, message, **options):
    """All messages that the server sends after `message`."""
    with connect(page.replace("http", "ws") + "write", **options) as socket:
        socket.send(message)
        return [json.loads(text) for text in socket]


def test_the_points_are_those_of_the_writer(page, writer):
    *points, last = asked(page, json.dumps({"text": "a line", "seed": 5, "caution": 3, "speed": 500}))
    expected = list(writer.Writer.load().write("a line", seed=5, caution=3))
    np.testing.assert_allclose(points, expected, rtol=0, atol=0.5001e-4)  # four decimals are sent
    assert last["done"] == len(expected)
    assert last["microseconds"] > 0


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("text", "the message must be JSON"),
        (b"\xff\x00", "the message must be JSON"),
        ("[" * 1000, "the message must be JSON"),
        ("[]", 'the message must be an object with a string "text"'),
        ('{"text": ["a"]}', 'the message must be an object with a string "text"'),
        ('{"text": "a", "longest": 1e9}', "the message must have text, seed, caution, speed only, got 'longest'"),
        (json.dumps({"text": "a" * 41}), "text must have at most 40 characters, got 41"),
        ('{"text": "A1"}', "text must have the letters a to z and spaces only, got '1' 'A'"),
        ('{"text": "  "}', "text must have a letter, got '  '"),
        ('{"text": "a", "seed": -1}', "seed must be an integer from 0 to 999999"),
        ('{"text": "a", "seed": true}', "seed must be an integer from 0 to 999999"),
        ('{"text": "a", "caution": NaN}', "caution must be a number from 0 to 5"),
        ('{"text": "a", "speed": 1e300}', "speed must be a number from 10 to 500"),
        ('{"text": "a", "speed": "60"}', "speed must be a number from 10 to 500"),
    ],
)
def test_messages_that_are_refused(page, message, error):
    assert asked(page, message) == [{"error": error}]


def test_what_else_is_refused(page):
    with pytest.raises(ConnectionClosed, match="1009"):  # too big
        asked(page, json.dumps({"text": "a" * 2000}))
    with pytest.raises(InvalidStatus, match="403"):
        asked(page, "{}", origin="http://example.org")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(page + "writer_page.py")


def test_as_many_lines_at_a_time_as_there_are_pens(page):
    with contextlib.ExitStack() as waiting:
        for _ in range(16):
            waiting.enter_context(connect(page.replace("http", "ws") + "write"))
        with pytest.raises(InvalidStatus, match="503"):
            asked(page, "{}")
    assert "error" in asked(page, "{}")[0]


INK = """(() => { const p = $('paper'), d = p.getContext('2d').getImageData(0, 0, p.width, p.height).data;
let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"""
STATUS = "$('status').textContent"


def opened(browser, page):
    browser.call("Page.navigate", url=page)
    browser.wait("typeof $ !== 'undefined' && $('controls').onsubmit !== null")


def press(browser, key, code):
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


@pytest.mark.exhaustive
def test_a_line_is_drawn_while_it_is_written_without_a_mouse(browser, page, writer, tmp_path):
    opened(browser, page)
    press(browser, "Tab", 9)
    assert browser.run("document.activeElement.id") == "text"
    browser.run("$('text').select()")
    browser.call("Input.insertText", text="Pen strokes")
    press(browser, "Enter", 13)
    browser.wait("strokes.length > 3")
    early = browser.run(INK)
    assert browser.run(STATUS) == "Writing “pen strokes”."
    browser.wait("strokes.length > 5")
    assert browser.run(INK) > early > 0
    browser.wait("pen.x > 24")
    browser.picture(Path(os.environ.get("CNORM_WRITER_SCREENSHOT", tmp_path / "page.png")))
    browser.wait("!socket")
    line = np.array(list(writer.Writer.load().write("pen strokes", seed=1)))
    assert browser.run(STATUS).startswith(f"“pen strokes” written: {len(line)} pen points, ")
    lengths = [len(stroke) for stroke in np.split(line, np.flatnonzero(line[:, 2]) + 1)]
    assert [len(stroke) for stroke in browser.run("strokes")] == lengths
    found = [browser.run("pen.x"), browser.run("pen.y")]
    np.testing.assert_allclose(found, line[:, :2].sum(0), rtol=0, atol=1e-4 * len(line))


def test_errors_and_the_end_are_said(browser, page):
    opened(browser, page)
    browser.run("$('text').value = 'no!'; $('write').click()")
    browser.wait("!socket")
    assert browser.run(STATUS) == "Not written: text must have the letters a to z and spaces only, got '!'."
    browser.run("$('text').value = 'a long line'; $('write').click()")
    browser.wait("strokes.length > 2")
    browser.run("$('stop').click()")
    assert browser.run(STATUS) == "Stopped."
    assert not browser.run("$('write').disabled")


def test_names_of_the_controls(browser, page):
    opened(browser, page)
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {(n["role"]["value"], n["name"]["value"]) for n in nodes if "name" in n and not n["ignored"]}
    assert {("button", "Write"), ("textbox", "Text: letters a to z and spaces, at most 40")} <= named
    assert {("spinbutton", name) for name in ("Seed", "Tidiness, 0 to 5", "Points a second")} <= named
    assert ("image", "Handwriting") in named or ("img", "Handwriting") in named
    assert "status" in {n["role"]["value"] for n in nodes if not n["ignored"]}
