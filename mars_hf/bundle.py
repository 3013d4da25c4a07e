"""The `custom_generate` folder of a saved checkpoint: the decoding half of the library, copied file by file."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from . import __version__

LIBRARY = Path(__file__).parent
ENTRY = "remote_generate"
FOLDER = "custom_generate"
# transformers reads one bound a line.
REQUIREMENTS = "torch>=2.6\ntransformers>=5.24\n"
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Copied from mars_hf/{name}.py of mars_hf {version} when the checkpoint was saved.
"""


def bundle() -> dict[str, str]:
    """The files of the folder, name to text: `generate.py` and every file of the library that it needs.

    transformers takes `custom_generate/generate.py` and follows its relative imports to files beside it, so the files
    need no change; which ones they are is read from the imports.
    """
    sources: dict[str, str] = {}
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = (LIBRARY / f"{name}.py").read_text(encoding="utf-8")
            waiting += _siblings(sources[name])
    files = {
        f"{'generate' if name == ENTRY else name}.py": HEADER.format(name=name, version=__version__) + text
        for name, text in sorted(sources.items())
    }
    return {**files, "requirements.txt": REQUIREMENTS}


def _siblings(source: str) -> list[str]:
    """The files of the library that a file imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            # The only form of relative import that transformers follows.
            module = node.module or ""
            assert node.level == 1, ast.unparse(node)
            assert module.isidentifier(), ast.unparse(node)
            names.append(module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            assert "mars_hf" not in ast.unparse(node), f"imported by its full name: {ast.unparse(node)}"
    return names


def write_bundle(folder: str | os.PathLike[str]) -> None:
    """Write the `custom_generate` folder of a checkpoint."""
    target = Path(folder, FOLDER)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in bundle().items():
        (target / name).write_text(text, encoding="utf-8")
