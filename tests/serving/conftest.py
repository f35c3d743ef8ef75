import pytest


@pytest.fixture
def browser(tmp_path):
    """A tab of a headless Chromium, if it is installed."""
    pytest.importorskip("websockets")
    from chromium import CHROMIUM, Browser

    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    one = Browser(tmp_path)
    yield one
    one.close()
