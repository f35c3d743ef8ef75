"""The release workflow, which only a public CI can run: it parses, and its jobs have the permissions that they need."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workflow():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_only_publishing_may_write(workflow):
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        writes = {scope for scope, access in job["permissions"].items() if access == "write"}
        assert writes == ({"id-token", "attestations"} if name == "publish" else set())
    assert workflow["jobs"]["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"


def test_every_step_uses_an_action_of_a_version_or_runs_a_command(workflow):
    for job in workflow["jobs"].values():
        assert set(job.get("needs", [])) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+(\.\d+)?|release/v1)", step["uses"])


def test_wheels_are_built_for_every_python_that_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    first = project["tool"]["cibuildwheel"]["build"].split()[0]
    assert project["project"]["requires-python"] == ">=3.11"
    assert first == "cp311-*"
    assert project["tool"]["cibuildwheel"]["test-extras"] == ["cli"]
    assert "cli" in project["project"]["optional-dependencies"]
