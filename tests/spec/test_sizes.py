"""Sizes: what a spec may write, one spelling for each, and what a person reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtaps.spec.schema import validate
from vtaps.spec.sizes import exact, human, parse_size
from vtaps.spec.yaml import loads


def findings(written: str) -> list[Any]:
    text = f"vtaps: 1\nmodel: {{path: m}}\nengine: {{tap_memory: {written}}}\n"
    doc, found = loads(text + "prompts: {p: [{id: a, text: b}]}\narms: {x: {}}\n", "s.yaml", Path())
    assert doc is not None and found == []
    return validate(doc)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512 MiB", 536_870_912),
        ("512MiB", 536_870_912),
        ("2 GB", 2_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        ("1.001 kB", 1001),
        ("999999 TiB", 999_999 * 2**40),
        (4096, 4096),
    ],
)
def test_bytes(written: int | str, size: int) -> None:
    assert findings(str(written)) == []
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["512 megabytes", "MiB", "0 MiB", "-1 MiB", "1e3 MiB", '"1"', "512 mib", "1 Gb", "0", "-4"]
)
def test_nonsense_is_refused(written: str) -> None:
    (d,) = findings(written)
    assert d.code == "VT104" and "engine.tap_memory" in d.message


@pytest.mark.parametrize("written", ["1.5", "true", "[1]", "{}"])
def test_another_type_is_refused(written: str) -> None:
    (d,) = findings(written)
    assert d.code == "VT103"


@given(st.integers(1, 2**62))
def test_one_spelling_for_each_size(size: int) -> None:
    assert parse_size(exact(size)) == size


def test_the_same_size_is_spelled_the_same() -> None:
    assert {exact(parse_size(w)) for w in ("2 GiB", "2048 MiB", 2**31)} == {"2 GiB"}
    assert exact(parse_size("2 GB")) == "1953125 KiB"
    assert exact(1001) == 1001


def test_what_a_person_reads() -> None:
    assert [human(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 GiB", "2.0 TiB"
    ]  # fmt: skip
