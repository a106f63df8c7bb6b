"""The manual and the examples against the product: specs check, links and names lead somewhere, options exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trees import DATA, seed_cache
from vtaps.check import check_file
from vtaps.cli import parser
from vtaps.codegen.lock import names
from vtaps.spec.codes import CODES
from vtaps.spec.parse import VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in (*DOCS.rglob("*.md"), ROOT / "README.md") if p.is_file())
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MODELINE = "# yaml-language-server: $schema=../schemas/spec-v1.schema.json\n"
MODEL = "../models/smollm2-135m-instruct"

_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def specs() -> Iterator[tuple[str, str]]:
    """(page and number, text) of each block that is a whole spec."""
    for page in PAGES:
        found = [b for b in blocks(page, "yaml") if b.startswith(("vtaps: 1", "# yaml-language-server"))]
        yield from ((f"{page_id(page)}:{i}", text) for i, text in enumerate(found))


def commands(page: Path) -> Iterator[str]:
    """Command lines of ``vtaps``: after a ``$`` in console blocks, any line of sh blocks."""
    for text in blocks(page, "console"):
        yield from (line[2:] for line in text.splitlines() if line.startswith("$ vtaps "))
    for text in blocks(page, "sh"):
        yield from (line for line in text.splitlines() if line.startswith("vtaps "))


SPECS = dict(specs())


@pytest.mark.parametrize("where", SPECS)
def test_specs_of_the_manual_are_good(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_cache(tmp_path / "cache", monkeypatch)
    text = SPECS[where]
    assert MODEL in text, f"a spec of the manual uses {MODEL}, so that a reader can run it"
    text = text.replace(f"path: {MODEL}", f"path: {DATA / 'configs' / 'smollm2'}, tokenizer: {DATA / 'tokenizer'}")
    for folder in ("vectors", "saes"):
        (tmp_path / folder).symlink_to(ROOT / "examples" / folder)
    for file in (*(ROOT / "examples").glob("*.jsonl"), *(ROOT / "examples" / f for f in ("edits.py", "probes.py"))):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    result = check_file(tmp_path / "spec.yaml")
    assert result.ok, "\n".join(f"{d.code}: {d.message}" for d in result.diagnostics)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads to nothing"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{link}: the page has {', '.join(anchors)}"


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    pages = {p.resolve() for p in DOCS.rglob("*.md") if p.name != "README.md"}
    assert pages <= linked, sorted(p.name for p in pages - linked)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_codes_exist(page: Path) -> None:
    named = set(re.findall(r"\bVT\d{3}\b", page.read_text(encoding="utf-8")))
    assert named <= set(CODES), sorted(named - set(CODES))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), file
        if name:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_command_lines_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(page):
        words = shlex.split(re.split(r" (?:[|;]|\d?>|&&) ?", line)[0], comments=True)[1:]
        try:
            parser().parse_args(words)
        except SystemExit as stop:  # --help and --version leave with 0
            assert stop.code == 0, f"{line}: {capsys.readouterr().err}"


def test_every_verb_of_an_edit_has_a_page() -> None:
    assert {p.stem for p in (DOCS / "verbs").glob("*.md")} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_a_verb_shows_its_block(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vtaps.compiling import compile_plan

    page = DOCS / "verbs" / f"{verb}.md"
    seed_cache(tmp_path / "cache", monkeypatch)
    text = SPECS[f"{page_id(page)}:0"]
    text = text.replace(f"path: {MODEL}", f"path: {DATA / 'configs' / 'smollm2'}, tokenizer: {DATA / 'tokenizer'}")
    for name in ("vectors", "saes", "edits.py"):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    plan = check_file(tmp_path / "spec.yaml").plan
    assert plan is not None
    compiled, _ = compile_plan(plan)
    assert compiled is not None
    shown = next(b for b in blocks(page, "python") if b.startswith("@BLOCK.location"))
    assert shown.strip() in compiled.block.source


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_whole(spec: Path) -> None:
    assert spec.read_text(encoding="utf-8").startswith(MODELINE)
    for name in names(spec.name):
        assert (spec.parent / name).is_file(), f"vtaps compile {spec.relative_to(ROOT)}"


def test_there_are_examples_and_specs() -> None:
    assert {p.stem for p in EXAMPLES} >= {
        "paris",
        "lens",
        "heads",
        "chat",
        "projections",
        "python",
        "probe",
        "features",
    }
    assert len(SPECS) >= len(VERBS) + 2


def test_the_manual_names_no_place_of_one_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(?:home|root|work|tmp|Users)/", page.read_text(encoding="utf-8")), page
