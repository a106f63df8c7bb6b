"""Files that a spec names and nobody should have to wait for, be surprised by, or run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.spec.fuzz import Hang, within
from tests.trees import model_beside
from vtaps.check import check_file
from vtaps.compiling import compile_plan
from vtaps.spec.diagnostics import Diagnostic
from vtaps.spec.gguf_files import GgufFileError, read_gguf
from vtaps.spec.tensor_files import VectorError, array_in, tensors_in
from vtaps.spec.torch_files import TorchFileError, read_torch

LONG = "x" * 300
HEAD = "vtaps: 1\nmodel: {path: data/configs/llama, dtype: float32, tokenizer: data/tokenizer}\n"
GOOD = {
    "vectors": "{push: {random: {}}}",
    "edits": '{steer: {at: "resid_post[1]", tokens: all, add: {vector: push}}}',
    "prompts": "{facts: [{id: a, text: The capital of France}]}",
    "arms": "{main: {edits: [steer]}}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = model_beside(tmp_path, monkeypatch)
    for name in ("fifo.safetensors", "fifo.npy", "fifo.pt", "fifo.gguf", "fifo.jsonl", "fifo.py"):
        os.mkfifo(here / name)
        (here / f"zero.{name.partition('.')[2]}").symlink_to("/dev/zero")
        (here / f"folder.{name.partition('.')[2]}").mkdir()
    return here


def found_in(folder: Path, more: str = "", **changed: str) -> list[Diagnostic]:
    """The errors of the good spec with these sections in place of its own."""
    said = {key: value for key, value in (GOOD | changed).items() if value}
    text = HEAD + more + "".join(f"{key}: {value}\n" for key, value in said.items())
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    with within(20):
        return [d for d in check_file("spec.yaml").diagnostics if d.severity == "error"]


def test_the_spec_that_is_spoilt_here_is_good(folder: Path) -> None:
    assert found_in(folder) == []


NAMES = ("fifo", "zero", "folder", "none", "a\\0b", "../../../../../dev/null", LONG)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", ["safetensors", "npy", "pt", "gguf"])
def test_a_vector_that_is_no_file(name: str, suffix: str, folder: Path) -> None:
    [one] = found_in(folder, vectors=f'{{push: {{file: "{name}.{suffix}"}}}}')
    assert (one.code, one.span.line) == ("VT306", 3)


@pytest.mark.parametrize("name", (*NAMES, "~nobody-at-all/x"))
def test_prompts_that_are_no_file(name: str, folder: Path) -> None:
    found = found_in(folder, prompts=f'{{facts: {{file: "{name}.jsonl", text: {{column: q}}}}}}')
    assert {(d.code, d.span.line) for d in found} == {("VT312", 5)}


@pytest.mark.parametrize("name", (*NAMES, "~nobody-at-all/x"))
def test_functions_that_are_in_no_file(name: str, folder: Path) -> None:
    edit = f'{{steer: {{at: "resid_post[1]", tokens: all, python: "{name}.py:f"}}}}'
    [one] = found_in(folder, vectors="", edits=edit)
    assert (one.code, one.span.line) == ("VT322", 3)


@pytest.mark.parametrize("name", ["fifos", "none", "a\\0b", LONG, "fifo.npy"])
def test_an_sae_that_is_no_folder_of_files(name: str, folder: Path) -> None:
    (folder / "fifos").mkdir()
    os.mkfifo(folder / "fifos" / "cfg.json")
    edit = '{steer: {at: "resid_post[1]", tokens: all, feature: {sae: s, index: 0, by: 1}}}'
    [one] = found_in(folder, f'saes: {{s: {{dir: "{name}"}}}}\n', vectors="", edits=edit)
    assert (one.code, one.span.line) == ("VT335", 3)


@pytest.mark.parametrize("name", ["fifos", "bare", "none", "a\\0b", LONG, "~nobody-at-all/x", "fifo.npy"])
def test_a_run_that_is_none(name: str, folder: Path) -> None:
    (folder / "fifos").mkdir()
    os.mkfifo(folder / "fifos" / "run.json")
    (folder / "bare").mkdir()
    index = '{"run": 1, "status": "complete", "files": {}, "lock": {"file": "run.json"}}'
    (folder / "bare" / "run.json").write_text(index)
    edit = f'{{steer: {{at: "resid_post[1]", tokens: prompt, set: {{rows: {{run: "{name}", arm: a, read: r}}}}}}}}'
    [one] = found_in(folder, vectors="", edits=edit)
    assert (one.code, one.span.line) == ("VT327", 3)


@pytest.mark.parametrize("name", ["a\\0b", LONG, "~nobody-at-all/x", "fifo.npy", "data/configs/gpt2"])
def test_a_tokenizer_that_is_none(name: str, folder: Path) -> None:
    """``data/configs/gpt2`` is a model without a vocabulary: transformers would make an empty tokenizer of it."""
    (folder / "spec.yaml").write_text(
        HEAD.replace("data/tokenizer", f'"{name}"') + "".join(f"{key}: {value}\n" for key, value in GOOD.items())
    )
    with within(5):
        found = [d for d in check_file("spec.yaml").diagnostics if d.severity == "error"]
    assert {(d.code, d.span.line) for d in found} <= {("VT213", 2), ("VT214", 2)} and found


@pytest.mark.parametrize("text", ["\\ud83d", "a \\ud800 b"])
def test_a_prompt_of_half_a_character(text: str, folder: Path) -> None:
    found = found_in(folder, prompts=f'{{facts: [{{id: a, text: "{text}"}}]}}')
    assert [(d.code, d.span.line) for d in found] == [("VT001", 5)]


@pytest.mark.parametrize("line", ['{"q": ' + "[" * 100_000, '{"q": "\\ud800"}', '{"q": 1' + "0" * 9999 + "}"])
def test_a_line_of_prompts_that_means_nothing(line: str, folder: Path) -> None:
    (folder / "p.jsonl").write_text(line + "\n")
    found = found_in(folder, prompts="{facts: {file: p.jsonl, text: {column: q}}}")
    assert {d.code for d in found} == {"VT312"}


@pytest.mark.parametrize("inside", ["(" * 5000, "x = " + "-" * 200_000 + "1", "\0", "é".encode("latin-1")])
def test_a_file_of_functions_that_is_no_python(inside: str | bytes, folder: Path) -> None:
    (folder / "f.py").write_bytes(inside if isinstance(inside, bytes) else inside.encode())
    [one] = found_in(folder, vectors="", edits='{steer: {at: "resid_post[1]", tokens: all, python: "f.py:f"}}')
    assert one.code == "VT322" and "does not parse" in one.message


def test_a_function_that_is_named_is_not_run_to_be_checked(folder: Path) -> None:
    (folder / "f.py").write_text("open('ran', 'w').close()\ndef f(rows):\n    return rows\n")
    code = "import sys; from vtaps.cli import main; sys.exit(main(['compile', 'spec.yaml']))"
    assert found_in(folder, vectors="", edits='{steer: {at: "resid_post[1]", tokens: all, python: "f.py:f"}}') == []
    plan = check_file("spec.yaml").plan
    assert plan is not None and compile_plan(plan)[0] is not None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir() if p.is_file() and "." in p.name and "zero" not in p.name) == [
        "f.py", "spec.block.py", "spec.lock.json", "spec.yaml",
    ]  # fmt: skip


# What a tensor file can claim


def zipped(path: Path, pickled: bytes, byteorder: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickled)
        file.writestr("x/data/0", b"\0" * 16)
        if byteorder is not None:
            file.writestr("x/byteorder", byteorder, compress_type=compression)
    return path


def tensor(shape: Any, strides: Any, more: Callable[[bytes], bytes] = lambda made: made) -> bytes:
    """A pickle of one float32 tensor on storage 0, by hand: no torch is needed."""
    out = io.BytesIO()

    class Storage:
        def __reduce__(self) -> Any:
            return (_Name("torch", "FloatStorage"), ())

    class Pickler(pickle._Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value[1:] if isinstance(value, tuple) and value[:1] == ("stored",) else None

        def save(self, value: Any, save_persistent_id: bool = True) -> None:
            if isinstance(value, _Name):
                self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            else:
                super().save(value, save_persistent_id)

    class Made:
        def __reduce__(self) -> Any:
            stored = ("stored", "storage", _Name("torch", "FloatStorage"), "0", "cpu", 4)
            return _Name("torch._utils", "_rebuild_tensor_v2"), (stored, 0, shape, strides, False, None)

    Pickler(out, protocol=2).dump(Made())
    return more(out.getvalue())


class _Name:
    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None: ...


def test_the_tensor_that_is_spoilt_here_is_good(folder: Path) -> None:
    assert array_in(zipped(folder / "x.pt", tensor((4,), (1,)), b"little"), None).tolist() == [0, 0, 0, 0]


def limited(path: Path) -> str:
    """What reading it says, in a process that has little memory and little time."""
    code = f"""
import resource, sys
from pathlib import Path
from vtaps.spec.tensor_files import VectorError, array_in
have = int(open('/proc/self/statm').read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (have + (1 << 29), have + (1 << 29)))
try:
    print(array_in(Path({str(path)!r}), None).shape)
except VectorError as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("pickled", "says"),
    [
        (b"\x80\x02]r\xff\xff\xff\x7f.", "()"),  # a memo of 2^31 places
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\0\0\0.", "does not load"),  # 2^40 bytes
        (tensor((1 << 20, 1 << 20), (0, 0)), "larger than"),
        (tensor((1 << 50, 1 << 50), (0, 0)), "no tensor has the shape"),
    ],
    ids=["memo", "bytes", "expanded", "uncountable"],
)
def test_a_pickle_that_claims_more_than_there_is(pickled: bytes, says: str, folder: Path) -> None:
    told = limited(zipped(folder / "x.pt", pickled))
    assert says in told or "holds 0 tensors" in told


def test_lists_of_the_same_list_are_counted_as_often_as_they_are_reached(folder: Path) -> None:
    lists = b"]" + b"".join(b"q%c(" % i + b"h%c" % i * 40 + b"l" for i in range(7))
    with pytest.raises(TorchFileError, match="more than 100,000 things"), within(20):
        read_torch(zipped(folder / "x.pt", b"\x80\x02" + lists + b"."))


def test_a_pickle_cannot_set_attributes_of_what_reads_it(folder: Path) -> None:
    from vtaps.spec import torch_files

    before = torch_files._tensor.__defaults__
    state = b"N}X\x0c\0\0\0__defaults__(I1\nts\x86b"
    pickled = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + state + b"."
    read_torch(zipped(folder / "x.pt", pickled))
    assert torch_files._tensor.__defaults__ == before


def test_a_compressed_word_beside_the_tensors(folder: Path) -> None:
    path = zipped(folder / "x.pt", tensor((4,), (1,)), b"little" + b"\0" * (1 << 20), zipfile.ZIP_DEFLATED)
    with pytest.raises(TorchFileError, match="compressed"):
        read_torch(path)


def test_an_encrypted_tensor(folder: Path) -> None:
    path = zipped(folder / "x.pt", tensor((4,), (1,)))
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02")  # the entry of x/data/0 in the directory of the archive
    raw[at + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(VectorError, match="cannot be read"):
        array_in(path, None)


@pytest.mark.parametrize("name", ["archive.npy", "pickle.npy", "object.npy", "huge.npy", "cut.npy", "odd.npy"])
def test_a_npy_file_that_is_another_thing(name: str, folder: Path) -> None:
    path = folder / name
    if name == "archive.npy":
        np.savez(folder / "x.npz", a=np.ones(3))
        path.write_bytes((folder / "x.npz").read_bytes())
    elif name == "pickle.npy":
        path.write_bytes(pickle.dumps([1.0]))
    elif name == "object.npy":
        np.save(path, np.array([1, "x"], object), allow_pickle=True)
    else:
        shape = {"huge.npy": "(1 << 99,)", "cut.npy": "(9,", "odd.npy": "(-1, 3)"}[name].replace(
            "1 << 99", str(1 << 99)
        )
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + b"\0" * 12)
    with pytest.raises(VectorError, match=r"is not a \.npy file"):
        array_in(path, None)


def gguf(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts) + b"\0" * 64


def text(said: bytes) -> bytes:
    return struct.pack("<Q", len(said)) + said


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF",
        b"GGML" + b"\0" * 60,
        gguf(version=1),
        gguf(version=3 << 24),
        gguf(values=2**60),
        gguf(tensors=2**60),
        gguf(struct.pack("<Q", 2**62), values=1),
        gguf(text(b"k"), struct.pack("<IIQ", 9, 4, 2**40), values=1),
        gguf(text(b"k"), struct.pack("<IIQ", 9, 8, 2**40), values=1),
        gguf(text(b"k"), struct.pack("<IIQ", 9, 9, 1) * 9, values=1),
        gguf(text(b"k"), struct.pack("<I", 77), values=1),
        gguf(text(b"general.alignment"), struct.pack("<II", 4, 0), values=1),
        gguf(text(b"v"), struct.pack("<I", 2**30), tensors=1),
    ],
)
def test_a_gguf_file_that_claims_more_than_there_is(raw: bytes, folder: Path) -> None:
    (folder / "x.gguf").write_bytes(raw)
    with pytest.raises(GgufFileError), within(5):
        read_gguf(folder / "x.gguf")


def test_a_gguf_tensor_past_the_end(folder: Path) -> None:
    info = text(b"v") + struct.pack("<IQIQ", 1, 2**40, 0, 0)
    (folder / "x.gguf").write_bytes(gguf(info, tensors=1))
    assert tensors_in(folder / "x.gguf")["v"].shape == (2**40,)
    with pytest.raises(VectorError, match="past the end"):
        array_in(folder / "x.gguf", "v")


def test_an_alarm_that_rings_is_heard() -> None:
    """The clock of these tests is one that runs."""
    with pytest.raises(Hang), within(0.05):
        while True:
            pass
