"""A generator that forgets the second statement of a location is caught before a file is replaced."""

from dataclasses import replace
from pathlib import Path

from tests.golden.cases import Found, copy_of
from vtaps import compiling
from vtaps.check import check_file
from vtaps.codegen.block import emit


def findings(folder: Path) -> Found:
    copy_of("blocks/verbs", folder)
    plan = check_file("spec.yaml").plan
    assert plan is not None
    forgetful = replace(plan, locations=tuple(replace(p, statements=p.statements[:1]) for p in plan.locations))
    block = emit(forgetful)
    before, compiling.emit = compiling.emit, lambda _: block
    try:
        return compiling.compile_plan(plan)[1], {}
    finally:
        compiling.emit = before
