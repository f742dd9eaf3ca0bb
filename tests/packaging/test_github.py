"""Workflows, issue forms and the citation parse, and name what is there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import whence

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_is_a_workflow_for_tests_every_week_the_docs_and_a_release() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests", "weekly"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_ends_in_time_may_only_read_and_runs_what_is_there(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}  # a job that may more says so itself
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 180, name
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step), step
        for target in re.findall(r"make ([\w-]+)", step.get("run", "")):
            assert target in targets
        for script in re.findall(r"^(\.ci/\w+)", step.get("run", "")):
            assert (ROOT / script).stat().st_mode & 0o100
        for folder in re.findall(r"pytest (\S+)", step.get("run", "")):
            assert (ROOT / folder).is_dir()


def test_a_release_is_published_without_a_password_and_after_the_tests() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    runs = [step.get("run") for step in jobs["build"]["steps"]]
    assert runs.index("make test") < runs.index(".venv/bin/python -m build")


@pytest.mark.parametrize(
    "path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem
)
def test_an_issue_form_has_what_github_asks_for(path: Path) -> None:
    form = read(path)
    assert form["name"]
    assert form["description"]
    kinds = {part["type"] for part in form["body"]}
    assert kinds <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert kinds != {"markdown"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked)
    assert all(part["attributes"]["label"] for part in asked)


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == whence.__version__
    assert citation["license"] == "Apache-2.0"
    assert {"message", "title", "authors"} <= citation.keys()
