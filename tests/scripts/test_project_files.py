"""What visitors of the repository, a host and a package index read is consistent."""

from __future__ import annotations

import pathlib
import re
import tomllib
from typing import Any

import pytest
import yaml

from scripts import check_wheel

ROOT = pathlib.Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def jobs() -> dict[str, Any]:
    return dict(read_yaml(".github/workflows/ci.yml")["jobs"])


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_every_script_that_the_workflow_runs_is_there() -> None:
    run = [command for job in jobs().values() for command in commands(job)]
    named = {name for command in run for name in re.findall(r"\bscripts/[\w/.]+", command)}
    assert named >= {"scripts/test.sh", "scripts/docs.sh", "scripts/check_wheel.py"}
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_workflow_tests_every_python_that_is_declared() -> None:
    prefix = "Programming Language :: Python :: 3."
    declared = [f"3.{c.removeprefix(prefix)}" for c in PROJECT["classifiers"] if prefix in c]
    assert declared == list(check_wheel.VERSIONS)
    assert PROJECT["requires-python"] == f">={declared[0]}"
    for name in ("quick", "whole"):
        assert jobs()[name]["strategy"]["matrix"]["python"] == declared


def test_the_whole_suite_runs_at_night_and_nothing_else_does() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert read_yaml(".github/workflows/ci.yml")[True]["schedule"]
    nightly = [name for name, job in jobs().items() if "!= 'schedule'" not in job.get("if", "")]
    assert nightly == ["whole"]
    assert any("test.sh all" in command for command in commands(jobs()["whole"]))


def test_the_citation_is_of_this_project() -> None:
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(
        citation
    )  # what the format requires
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_the_changelog_opens_with_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)
    assert sections[0] == "Unreleased"
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE)) <= allowed


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_links_between_these_files_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("https://")]
    assert local
    assert [link for link in local if not (ROOT / link).is_file()] == []


def test_commits_are_checked_as_the_test_script_checks() -> None:
    hooks = {hook["id"]: hook for hook in read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]}
    script = (ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    for hook, command in (
        ("ruff", "-m ruff check"),
        ("ruff-format", "-m ruff format"),
        ("mypy", "-m mypy"),
    ):
        assert command in hooks[hook]["entry"]
        assert command in script
