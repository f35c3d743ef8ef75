"""The page of examples/serve in headless Chromium."""

import hashlib
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import servers

import cnorm

pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

LOG = "document.getElementById('log').textContent"


def play(browser, choice, done):
    """Play a recording and wait until the log has `done` lines with a hash; returns the hashes."""
    browser.run(f"$('recording').value = '{choice}'; $('interval').value = 5; $('play').click()")
    browser.wait(f"{LOG}.split('SHA-256').length > {done}")
    return re.findall(r"SHA-256 ([0-9a-f]{64})", browser.run(LOG))


@pytest.mark.exhaustive
def test_the_worker_is_killed_while_a_recording_plays(browser, tmp_path):
    with servers.served("--page", servers.PAGE) as (_, url):
        browser.call("Page.navigate", url=url.replace("ws:", "http:").replace("/stream", "/"))
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length > 20")
        first = play(browser, "all", 1)
        browser.run("$('recording').value = 'all'; $('interval').value = 5; $('play').click()")
        browser.wait("session.delivered > 4 && !$('kill').disabled")
        browser.run("$('kill').click()")
        browser.wait(f"{LOG}.split('SHA-256').length > 2")
        text = browser.run(LOG)
        assert "connection lost" in text
        assert "continued at frame" in text
        assert "the same bits as before" in text
        assert "OTHER BITS" not in text
        assert set(re.findall(r"SHA-256 ([0-9a-f]{64})", text)) == set(first)
        browser.picture(Path(os.environ.get("CNORM_SCREENSHOT", tmp_path / "page.png")))


@pytest.mark.exhaustive
def test_a_file_has_the_hash_of_the_library(browser, tmp_path):
    """Also with a model of one's own, which has no recordings, and of an array in Fortran order, as of a transpose."""
    x = np.random.default_rng(3).standard_normal((40, 12), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x))
    np.savetxt(tmp_path / "x.csv", x, delimiter=",", fmt="%.9g")
    cnorm.demo_model().save(tmp_path / "model.safetensors")
    expected = hashlib.sha256(cnorm.demo_model().stream().process(x).tobytes()).hexdigest()
    shutil.copytree(servers.PAGE, tmp_path / "page", ignore=shutil.ignore_patterns("*.json"))
    with servers.served(tmp_path / "model.safetensors", "--page", tmp_path / "page") as (_, url):
        browser.call("Page.navigate", url=url.replace("ws:", "http:").replace("/stream", "/"))
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length === 1")
        assert browser.run("$('play').disabled")
        browser.run("$('interval').value = 1; $('controls').requestSubmit()")
        for done, name in enumerate(("x.npy", "fortran.npy", "x.csv"), 1):
            root = browser.call("DOM.getDocument")["root"]["nodeId"]
            node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
            browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / name)])
            browser.wait(f"{LOG}.split('SHA-256').length > {done}")
        log = browser.run(LOG)
        assert log.count(expected) == 3
        assert "Cannot" not in log
        assert "%" not in browser.run("$('summary').textContent")  # y itself: without labels it is no classifier's
        assert browser.run("$('play').disabled")


def test_without_tls_outputs_are_compared_all_the_same(browser):
    """Off localhost a page without TLS has no SHA-256."""
    with servers.served("--page", servers.PAGE) as (_, url):
        browser.call("Page.navigate", url=url.replace("ws:", "http:").replace("/stream", "/"))
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length > 20")
        browser.run("Object.defineProperty(crypto, 'subtle', { value: undefined }); $('interval').value = 1")
        for done in (1, 2):
            browser.run("$('recording').value = '0'; $('play').click()")
            browser.wait(f"{LOG}.split('SHA-256 needs TLS').length > {done}")
        assert "the same bits as before" in browser.run(LOG)


@pytest.mark.exhaustive
def test_the_page_without_a_mouse(browser):
    """Names of all controls, and what a screen reader is told."""
    with servers.served("--page", servers.PAGE) as (_, url):
        browser.call("Page.navigate", url=url.replace("ws:", "http:").replace("/stream", "/"))
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length > 20")
        browser.call("Accessibility.enable")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        named = {(n["role"]["value"], n["name"]["value"]) for n in nodes if "name" in n and not n["ignored"]}
        assert ("button", "Play") in named
        assert ("combobox", "Recording") in named
        assert ("spinbutton", "Milliseconds a frame") in named
        assert ("image", "Outputs") in named or ("img", "Outputs") in named
        play(browser, 0, 1)
        assert re.match(r"Frame \d+ of \d+: output \d with", browser.run("$('summary').textContent"))
        assert "median" in browser.run("$('latency-summary').textContent")
