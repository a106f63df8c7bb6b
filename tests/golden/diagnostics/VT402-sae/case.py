"""An SAE changed after compile, the spec did not."""

import shutil
from pathlib import Path

from tests.golden.cases import DATA, GOLDEN, Found, compile_here
from tests.saes import write_sae
from vtaps.codegen.drift import drift


def findings(folder: Path) -> Found:
    shutil.copytree(GOLDEN / "blocks/saes", folder, dirs_exist_ok=True)
    (folder / "data").symlink_to(DATA)
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text(encoding="utf-8").replace("../../../data", "data"), encoding="utf-8")
    doc, files = compile_here(spec)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_sae(folder / "saes/layer_2", "standard", 128, 8, seed=7, hook_name="blocks.2.hook_resid_post")
    doc, files = compile_here(spec)
    return drift(files, doc.folder, doc.file), {}
