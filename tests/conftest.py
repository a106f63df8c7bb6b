"""Options and fixtures of all tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes that start engines each gets a core of its own: two on the same cores wait for each other's
    threads."""
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER", ""), sorted(os.sched_getaffinity(0))
    if os.environ.get("VTAPS_TESTS") == "engine" and worker.startswith("gw") and len(cores) > 1:
        os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="write the expected files of the golden cases anew")


@pytest.fixture(scope="session")
def regen(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regen"))
