"""A disk that fails or fills up, a process that dies, two starts at once: what is read is whole or refused by name, and
the next start gives the files of a run that nothing disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.results import faulty, make
from tests.results.test_folder import ORDER, REPOSITORY, content, opened, refused, write
from vtaps.cli import main
from vtaps.runtime.results.folder import WriteError
from vtaps.runtime.results.load import RunError, load

EVERY = "VTAPS_EVERY_FAULT" in os.environ
"""Whether every call fails in every way (`make faults`); else some ways take some of the calls."""

WAYS = [
    ("SIGKILL", 0, 5),
    ("ENOSPC", 1, 11),
    ("EIO", 2, 17),
    ("EINTR", 3, 29),
    ("SIGINT", 4, 13),
    ("overwrite-SIGKILL", 0, 17),
    ("overwrite-ENOSPC", 2, 29),
]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    source = Path(faulty.__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory: thousands of fsyncs wait for no disk."""
    folder = Path(f"/dev/shm/{tmp_path.parent.parent.name}-{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}")
    if not os.access(folder.parent, os.W_OK):
        folder = tmp_path / "memory"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("way", "first", "step"), WAYS, ids=[w for w, _, _ in WAYS])
def test_a_fault_at_every_call(way: str, first: int, step: int, library: Path, memory: Path) -> None:
    numbers = ["0", "1"] if EVERY else [str(first), str(step)]
    asked = [sys.executable, "-m", "tests.results.faulty", library, memory, way, *numbers]
    told = subprocess.run(
        asked, cwd=REPOSITORY, env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    *lines, last = told.stdout.splitlines()
    found = json.loads(last)
    assert found["calls"] > 100 and not found["wrong"], "\n".join([*lines, last, told.stderr])


@pytest.mark.parametrize(("size", "while_served"), [("32k", True), ("60k", False)])
def test_a_disk_that_is_full_says_what_is_whole_and_how_to_go_on(size: str, while_served: bool, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root can mount")
    try:
        with pytest.raises(WriteError) as caught:
            write(disk / "run")
        kept = len(list((disk / "run/partial").glob("[0-9]*.safetensors")))
        assert kept > 0 and (kept < len(ORDER)) == while_served
        assert caught.value.message == f"results cannot be written to {disk / 'run'}: the disk is full"
        assert caught.value.note.startswith(
            f"{kept} of {len(ORDER)} requests are kept there, each whole; free some space"
        )
        with pytest.raises(RunError, match="has not finished"):
            load(disk / "run")
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        with opened(disk / "run") as run:
            assert len(run.done) == kept
        assert content(write(disk / "run")) == content(write(tmp_path / "plain"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


HOLDING = """
import os, sys, time
from tests.results import make
from vtaps.runtime.results.folder import RunFolder
requests = make.requests()
order = [r.key for r in requests]
run, _ = RunFolder.open(sys.argv[1], make.LOCK, order=order, blocks={"paris.block.py": "BLOCK = 1\\n"})
assert run is not None
run.add(make.finish(requests[0]))
child = os.fork()
if not child:
    time.sleep(60)  # as a worker that outlives its driver
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_second_start_is_refused_with_the_first_s_process_until_that_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run"
    asked = [sys.executable, "-c", HOLDING, path]
    first = subprocess.Popen(asked, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    child = int(first.stdout.readline())
    try:
        before = content(path)
        for options in ({}, {"overwrite": True}):
            code, told = refused(path, **options)
            assert code == "VT605" and f"process {first.pid} is writing the run in {path}" in told
        assert content(path) == before
        first.kill()
        first.wait()
        os.kill(child, 0)  # is still there
        with opened(path) as run:
            assert run.done == {ORDER[0]}
    finally:
        first.kill()
        os.kill(child, signal.SIGKILL)
    assert content(write(path)) == content(write(tmp_path / "plain"))


def test_a_lock_file_that_a_dead_process_left_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").write_text(f"{os.getpid()}\n")
    assert content(write(tmp_path / "run")) == content(write(tmp_path / "plain"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has every kind of file but scores of gates."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with opened(path) as run:
        for request in make.requests():
            run.add(make.finish(request))
        run.finish({}, vectors=faulty.VECTORS)
    return path


def read_all(path: Path) -> None:
    run = load(path)
    assert run.requests.num_rows and run.metrics.num_rows and run.tokens.num_rows
    for name in run.reads:
        for site in run[name].sites:
            for field in run[name].fields:
                run[name].site(site, field)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    """One bit of the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap_digits(file: Path) -> None:
    """A number of a JSON file, so that it still parses."""
    text = file.read_text()
    at = next(i for i, c in enumerate(text) if i > len(text) // 2 and c.isdigit())
    file.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink], ids=["cut", "flip", "missing"])
def test_every_file_of_a_finished_run_that_is_spoiled_is_refused_by_name(
    spoil: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    read_all(finished)
    names = list(content(finished))
    assert len(names) == 16 and "vectors/mu.safetensors" in names and "paris.block.py" in names
    for name in names:
        path = tmp_path / "run"
        shutil.copytree(finished, path)
        spoil(path / name)
        before = content(path)
        if spoil is flip and name.endswith((".py", "mu.safetensors")):
            with pytest.raises(RunError, match=name):
                load(path).whole(name)
        else:
            with pytest.raises(RunError, match=name.replace("run.json", "run[. ]")):
                read_all(path)
        assert refused(path)[0] == "VT605"
        assert content(path) == before, "nothing is overwritten"
        shutil.rmtree(path)


def test_a_number_that_changed_in_run_json_or_the_lock_is_noticed(finished: Path, tmp_path: Path) -> None:
    for name in ("run.json", "lock.json"):
        shutil.copytree(finished, tmp_path / name)
        swap_digits(tmp_path / name / name)
        json.loads((tmp_path / name / name).read_text())
        with pytest.raises(RunError, match=f"{name} is not .* digest"):
            load(tmp_path / name)


@pytest.mark.parametrize(
    "spoil", [cut, Path.unlink, lambda file: file.write_bytes(b"")], ids=["cut", "missing", "empty"]
)
def test_every_file_of_an_unfinished_run_that_is_spoiled(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """A request is computed again; without its plan the folder is refused, and nothing in it is touched."""
    plain = content(write(tmp_path / "plain"))
    with opened(tmp_path / "half") as run:
        for request in make.requests()[:3]:
            run.add(make.finish(request))
    for name in content(tmp_path / "half"):
        path = tmp_path / "run"
        shutil.copytree(tmp_path / "half", path)
        spoil(path / name)
        with pytest.raises(RunError, match=str(path)):
            load(path)
        if name.endswith("plan.json"):
            before = content(path)
            assert refused(path)[0] == "VT605" and content(path) == before
        else:
            with opened(path) as run:
                assert len(run.done) == 2
            assert content(write(path)) == plain
        shutil.rmtree(path)


@pytest.mark.parametrize("name", ["run.json", "partial/plan.json"])
def test_a_folder_of_another_version_is_refused_by_that(name: str, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if name == "run.json":
        shutil.copytree(finished, path)
    else:
        with opened(path) as run:
            run.add(make.finish(make.requests()[0]))
    info = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(info | {"run" if name == "run.json" else "plan": 7}))
    before = content(path)
    for overwrite in (False, True):
        code, told = refused(path, overwrite=overwrite)
        assert code == "VT605" and "another version of vtaps (format 7; this one knows 1)" in told
    assert content(path) == before
    with pytest.raises(RunError, match="another version of vtaps.*format 7" if name == "run.json" else "not finished"):
        load(path)


def test_a_run_without_digests_is_said_to_be_of_an_earlier_version(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    info = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({k: v for k, v in info.items() if not k.startswith("digest")}))
    with pytest.raises(RunError, match="earlier version"):
        load(tmp_path / "run")
    assert refused(tmp_path / "run")[0] == "VT605"


MINE = [
    "notes.txt",
    "reads/mine.txt",
    "reads/stream/plot.png",
    "reads/other/x.csv",
    "vectors/mine.npy",
    "partial/x.bin",
]


def test_files_of_the_user_in_a_run_folder_stay_whatever_is_written_there(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with opened(path) as run:
        run.add(make.finish(make.requests()[0]))
    for name in MINE:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    write(path)
    with opened(path, overwrite=True) as run:
        run.add(make.finish(make.requests()[0]))
    write(path)
    after = content(path)
    assert {name: after.pop(name).decode() for name in MINE} == {name: name for name in MINE}
    assert after == content(write(tmp_path / "plain"))


def test_a_link_in_a_run_folder_is_not_followed_when_it_is_cleared(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    shutil.move(path / "reads", tmp_path / "elsewhere")
    (path / "reads").symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    with opened(path, overwrite=True) as run:
        run.add(make.finish(make.requests()[0]))
    write(path)
    assert content(tmp_path / "elsewhere") == before and not (path / "reads").is_symlink()


def test_show_says_what_is_wrong_without_a_traceback(finished: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(finished, tmp_path / "run")
    flip(tmp_path / "run/tokens.parquet")
    assert main(["show", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "tokens.parquet is not the file that the run wrote" in told and "Traceback" not in told
