"""What the folders promise each other: imports point one way, heavy packages stay at the edge."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("schemas", "spec", "codegen", "runtime", "vtaps")  # each may import those to its left, and itself
FIRST_PARTY = {f"vtaps.{room}": room for room in ROOMS[:-1]}
HEAVY = ("torch", "vllm", "transformers")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAX_LINES = 400
HEAD_LINES = 30


class Import(NamedTuple):
    where: str  # FILE:LINE, for the message
    name: str  # the dotted name imported: `a.b.c` for both `import a.b.c` and `from a.b import c`
    at_load: bool  # runs when the module is loaded: not inside a function, not for type checkers alone


def python_files(room: str) -> list[Path]:
    """The room's own files; the links in vtaps/ belong to the rooms that they point to."""
    linked = tuple(ROOT / "vtaps" / name for name in ROOMS[:-1])
    files = sorted((ROOT / room).rglob("*.py"))
    return [file for file in files if not any(file.is_relative_to(link) for link in linked)]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "vtaps" else ("vtaps", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[Import]:
    package = module_name(file).split(".")
    package = package if file.name == "__init__.py" else package[:-1]

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(where, alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(where, f"{prefix}.{alias.name}", at_load) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from walk(child, False)
            for child in node.orelse:
                yield from walk(child, at_load)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_load and not inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8"), str(file)), True)


def room_of(name: str) -> str | None:
    """The room that a dotted name lives in; None for anything that is not vtaps."""
    if name.partition(".")[0] in ROOMS[:-1]:  # a bare `spec`, which only works from the root of a checkout
        return name.partition(".")[0]
    for prefix, room in FIRST_PARTY.items():
        if name == prefix or name.startswith(prefix + "."):
            return room
    return "vtaps" if name == "vtaps" or name.startswith("vtaps.") else None


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    wrong = [
        f"{found.where}: {room} imports {found.name}"
        for file in python_files(room)
        for found in imports(file)
        # the version is a constant, defined before vtaps/__init__.py imports anything
        if room_of(found.name) not in (None, *allowed) and found.name != "vtaps.__version__"
    ]
    assert not wrong, "imports point one way, " + " <- ".join(ROOMS) + ":\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_bare_room_is_imported(room: str) -> None:
    wrong = [
        f"{found.where}: import vtaps.{found.name} instead"
        for file in python_files(room)
        for found in imports(file)
        if found.name.partition(".")[0] in ROOMS[:-1]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["schemas", "spec", "codegen"])
def test_heavy_packages_are_not_loaded_left_of_run(room: str) -> None:
    wrong = [
        f"{found.where}: {room} loads {found.name}"
        for file in python_files(room)
        for found in imports(file)
        if found.at_load and found.name.partition(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_vllm_is_imported_in_compat_alone() -> None:
    compat = ROOT / "runtime" / "compat"
    wrong = [
        f"{found.where}: {found.name}"
        for room in ROOMS
        for file in python_files(room)
        if not file.is_relative_to(compat)
        for found in imports(file)
        if found.name.partition(".")[0] == "vllm"
    ]
    assert not wrong, "only runtime/compat/ may import vllm:\n" + "\n".join(wrong)


def test_checking_and_compiling_load_neither_torch_nor_vllm() -> None:
    """Asks the interpreter, which also sees what other packages import."""
    modules = [
        "vtaps",
        *(module_name(f) for room in ("schemas", "spec", "codegen") for f in python_files(room)),
    ]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += f"print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"loaded: {done.stdout}"


def test_long_files_say_why() -> None:
    folders = (*ROOMS, "tests", "examples", "benchmarks", "requirements")
    wrong = []
    for file in (file for folder in folders for file in python_files(folder)):
        lines = file.read_text(encoding="utf-8").splitlines()
        reason = any(re.match(r"# long because: \S", line) for line in lines[:HEAD_LINES])
        if len(lines) > MAX_LINES and not reason and not file.name.endswith(".block.py"):
            wrong.append(f"{file.relative_to(ROOT)}: {len(lines)} lines")
    assert not wrong, (
        f"past {MAX_LINES} lines a file is split, or says `# long because: REASON` in its first "
        f"{HEAD_LINES} lines:\n" + "\n".join(wrong)
    )


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_rooms_are_linked_into_the_package(room: str) -> None:
    link = ROOT / "vtaps" / room
    assert link.is_symlink() and link.readlink() == Path("..", room)


def declared_entry_points() -> dict[str, str]:
    project = PYPROJECT["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    return {**project["scripts"], **{f"plugin {name}": target for name, target in plugins.items()}}


@pytest.mark.parametrize("target", declared_entry_points().values(), ids=declared_entry_points().keys())
def test_entry_points_name_something_callable(target: str) -> None:
    """vLLM only logs a plug-in that fails to load, so a wrong name here would be a silent one."""
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def pins() -> dict[str, list[str]]:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    return {
        file.name: [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        for file in files
    }


def test_requirements_are_exact_and_named_once() -> None:
    names: dict[str, str] = {}
    for file, lines in pins().items():
        for line in lines:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", line)
            assert match, f"{file}: {line!r} is not an exact pin"
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            assert name not in names, f"{name} is pinned in {names[name]} and in {file}"
            names[name] = file


def test_every_requirements_file_says_what_it_is_for() -> None:
    for file in pins():
        head = (ROOT / "requirements" / file).read_text(encoding="utf-8").partition("\n\n")[0]
        assert head.startswith("# ") and "pip install" in head, file


def test_the_cpu_extra_agrees_with_the_pins() -> None:
    pinned = {line for lines in pins().values() for line in lines}
    assert set(PYPROJECT["project"]["optional-dependencies"]["cpu"]) <= pinned
