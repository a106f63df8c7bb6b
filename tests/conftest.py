"""Options and fixtures of all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="write the expected files of the golden cases anew")


@pytest.fixture(scope="session")
def regen(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--regen"))
