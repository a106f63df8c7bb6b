"""What SARIF 2.1.0 asks of a log, for every test that has findings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator

from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.reporters import render

# No package that ships OASIS's schema is small and pure Python: this is the part of it that vtaps needs, by hand.
_SUBSET = json.loads((Path(__file__).parent / "data/sarif-2.1.0-subset.schema.json").read_text(encoding="utf-8"))
SCHEMA = Draft7Validator(_SUBSET)
# RFC 3986 without authority and query: no file's path may read as a scheme, a host or a fragment.
_RELATIVE = re.compile(r"(?!//)(?![^/]*:)(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-F]{2})+", re.ASCII)


def sarif(found: list[Diagnostic]) -> dict[str, Any]:
    """The findings as a SARIF log, held against the schema and what the standard says in words beside it."""
    log: dict[str, Any] = json.loads(render(found, "sarif", {}))
    wrong = [f"{e.json_path}: {e.message}" for e in SCHEMA.iter_errors(log)]
    assert not wrong, wrong
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]  # 3.27.6
        assert result["message"]["text"].strip()  # 3.11.8
        (place,) = (location["physicalLocation"] for location in result["locations"])
        assert _RELATIVE.fullmatch(place["artifactLocation"]["uri"]), place  # 3.4.3
        region = place["region"]
        start, end = ((region[f"{at}Line"], region[f"{at}Column"]) for at in ("start", "end"))
        assert start <= end, (result["ruleId"], region)  # 3.30.7, 3.30.8
    return log
