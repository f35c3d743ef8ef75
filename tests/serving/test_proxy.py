"""`cnorm serve` behind nginx, with the configuration of examples/serve."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import servers

import cnorm

pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from cnorm.client import ServerError, Session

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(not NGINX, reason="needs nginx")
EXAMPLE = Path(__file__).parents[2] / "examples/serve/nginx.conf"
UPGRADE = re.compile(r"^ *proxy_(http_version|set_header (Upgrade|Connection)).*\n", re.MULTILINE)


@contextlib.contextmanager
def proxied(folder, port, upgrade=True):
    """nginx before the server at `port`; yields its own port."""
    (own,) = servers.free_ports(1)
    text = EXAMPLE.read_text().replace("127.0.0.1:8765", f"127.0.0.1:{port}")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{own};")
    if not upgrade:
        text = UPGRADE.sub("", text)
    places = "\n".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {places}\n{text} }}\n"
    )
    command = [NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
    with subprocess.Popen(command) as process:
        try:
            end = time.monotonic() + 20
            while time.monotonic() < end and not answers(own):
                time.sleep(0.05)
            yield own
        finally:
            process.terminate()


def answers(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_of_the_server_behind_nginx(tmp_path, number):
    """nginx answers 502 meanwhile; the session continues with the same bits."""
    x = np.random.default_rng(1).standard_normal((60, 12), np.float32)
    (port,) = servers.free_ports(1)
    store = ("--store", tmp_path / "keys")
    with contextlib.ExitStack() as running:
        process, _ = running.enter_context(servers.served(*store, port=port))
        own = running.enter_context(proxied(tmp_path, port))
        session = running.enter_context(Session(f"ws://127.0.0.1:{own}/speech/stream", patience=60))
        y = [session.process(x[:20])]
        workers = servers.workers_of(process)
        process.send_signal(number)
        process.wait(30)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        began = threading.Timer(0.5, lambda: running.enter_context(servers.served(*store, port=port)))
        began.start()
        y.append(session.process(x[20:]))
        began.join()
        assert np.concatenate(y).tobytes() == cnorm.demo_model().stream().process(x).tobytes()


def test_nginx_without_the_upgrade_headers_is_named(tmp_path):
    with (
        servers.worker() as worker,
        proxied(tmp_path, worker.options.port, upgrade=False) as own,
        pytest.raises(ServerError, match="Upgrade"),
    ):
        Session(f"ws://127.0.0.1:{own}/speech/stream").process(np.zeros((1, 12), np.float32))


def test_the_page_under_a_path(tmp_path, browser):
    """Its script, its recordings and its session are beside it; a refused origin is said to be the likely cause."""
    log = "document.getElementById('log').textContent"
    with contextlib.ExitStack() as running:
        (port,) = servers.free_ports(1)
        own = running.enter_context(proxied(tmp_path, port))
        running.enter_context(servers.served("--origin", f"http://127.0.0.1:{own}", "--page", servers.PAGE, port=port))
        browser.call("Page.navigate", url=f"http://127.0.0.1:{own}/speech/")
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length > 20")
        browser.run("$('recording').value = '0'; $('interval').value = 5; $('play').click()")
        browser.wait(f"{log}.includes('SHA-256')")


def test_the_page_says_why_it_is_refused(browser):
    """A foreign name may have the page only if its origin is accepted; a wrong token is the other cause."""
    log = "document.getElementById('log').textContent"
    with servers.worker(token="secret", page=str(servers.PAGE)) as worker:
        browser.call("Page.navigate", url=worker.url.replace("ws:", "http:").replace("/stream", "/"))
        browser.wait("typeof $ !== 'undefined' && $('recording').options.length > 0")
        browser.run("$('interval').value = 5; $('play').click()")
        browser.wait(f"{log}.includes('?token=')")
        assert "--origin http://127.0.0.1" in browser.run(log)
