"""A headless Chromium, driven over its DevTools protocol."""

import base64
import itertools
import json
import shutil
import subprocess
import time

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, folder):
        self._process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--window-size=1000,1150", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        address = next(line for line in self._process.stderr if "DevTools listening on" in line).split()[-1]
        self._socket = connect(address, max_size=None, compression=None).__enter__()
        self._numbers = itertools.count(1)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def picture(self, path):
        """Write the page as PNG."""
        bottom = self.run("document.querySelector('main').getBoundingClientRect().bottom + scrollY")
        clip = {"x": 0, "y": 0, "width": 1000, "height": bottom + 16, "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def close(self):
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)
        self._process.stderr.close()
