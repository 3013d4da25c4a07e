"""The shape of the code: who imports whom, what is public, and that whoever only generates does not load TRL."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import mars_hf

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "mars_hf").glob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def table_of(heading: str) -> dict[str, set[str]]:
    """The table of docs/design.md whose first column is headed so: what each of its entries may import."""
    text = (ROOT / "docs" / "design.md").read_text()
    rows = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`/").removesuffix(".py"): set(imports.split(", ")) - {"-"} for name, _, imports in cells}


TABLE, PACKAGES = table_of("file"), table_of("package")
# What both training and decoding use.
SHARED = {"checks", "masks", "model_masks", "forward_arguments", "mask_token"}
# Each file of a package inside the library may import these files of the package, and these of the library.
SUBPACKAGES: dict[str, dict[str, tuple[set[str], set[str]]]] = {
    "baselines": {
        "arguments": (set(), {"checks", "generation_refusals", "outputs"}),
        "block_diffusion": (set(), {"masks"}),
        "block_diffusion_trainer": (
            {"block_diffusion"},
            {"checks", "fused_head", "loading", "mask_token", "masks", "model_masks", "refusals"},
        ),
        "block_diffusion_sampler": (
            {"arguments", "block_diffusion"},
            {"cache", "checks", "few_tokens", "forward_arguments", "masks", "model_masks", "outputs"},
        ),
        "jacobi": (
            {"arguments"},
            {
                "acceptance",
                "cache",
                "checks",
                "few_tokens",
                "forward_arguments",
                "masks",
                "model_masks",
                "model_refusals",
                "outputs",
            },
        ),
    },
    "metrics": {
        "agreement": (set(), set()),
        "bootstrap": (set(), set()),
        "gsm8k": (set(), set()),
        "paths": (set(), set()),
    },
    "vllm": {
        "settings": (set(), set()),
        "plan": (set(), set()),
        "counters": (set(), set()),
        "sampler": ({"settings", "plan", "counters"}, {"acceptance"}),
        "proposer": ({"settings", "sampler"}, set()),
        "worker": ({"settings", "counters", "sampler"}, set()),
        "plugin": ({"settings"}, set()),
        "serve": ({"settings", "plugin"}, set()),
    },
}


def imports_of(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(module, names) of every import of a file; relative ones as `mars_hf.module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"mars_hf.{node.module or ''}".rstrip(".") if node.level else node.module
            yield module, [alias.name for alias in node.names]


def own_imports(path: Path) -> set[str]:
    """The files of the library that a file of the library imports."""
    return {module.split(".")[1] for module, _ in imports_of(path) if module.startswith("mars_hf.")}


def needs(name: str) -> set[str]:
    """A file and all that it imports, directly or not, by the table."""
    return {name}.union(*(needs(other) for other in TABLE[name]))


def test_tables_have_a_row_for_all_that_is_there_and_for_nothing_else():
    assert TABLE.keys() == {path.stem for path in LIBRARY} - {"__init__"}
    assert PACKAGES.keys() == {path.parent.name for path in (ROOT / "mars_hf").glob("*/__init__.py")}


def test_table_runs_one_way():
    above: set[str] = set()
    for name, allowed in TABLE.items():
        assert allowed <= above, f"{name} imports from a file below it"
        above.add(name)


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.stem != "__init__"], ids=lambda path: path.stem)
def test_library_keeps_to_the_table(path: Path):
    assert own_imports(path) == TABLE[path.stem]


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_packages_inside_keep_to_their_table(package: str):
    table = SUBPACKAGES[package]
    files = {path.stem: path for path in (ROOT / "mars_hf" / package).glob("*.py") if path.stem != "__init__"}
    assert files.keys() == table.keys()
    above: set[str] = set()
    for name, (own, library) in table.items():
        assert own <= above, f"{package}.{name} imports from a file below it"
        above.add(name)
        for node in ast.walk(ast.parse(files[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in {1: own, 2: library}[node.level], f"{package}.{name} imports {node.module}"
    assert PACKAGES[package] == set().union(*(library for _, library in table.values()))


def test_training_and_decoding_meet_only_in_masks_and_in_what_a_model_takes():
    # The trainer itself hands its model to `get_mars_model`, so that it can generate; nothing below it knows decoding.
    for module in needs("sft_trainer") - needs("modeling") - {"sft_trainer"}:
        assert needs(module) & needs("modeling") <= SHARED


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_use_only_public_names(path: Path):
    for module, names in imports_of(path):
        if module.split(".")[0] == "mars_hf":
            assert module in ("mars_hf", *(f"mars_hf.{package}" for package in SUBPACKAGES))
            assert set(names) <= set(import_module(module).__all__)


@pytest.mark.parametrize("name", mars_hf.__all__)
def test_public_names_are_there(name: str):
    assert getattr(mars_hf, name).__module__.startswith("mars_hf.")
    assert name in dir(mars_hf)


def test_unknown_names_are_not():
    with pytest.raises(AttributeError, match="'mars_hf' has no attribute 'MarsTrainer'"):
        _ = mars_hf.MarsTrainer


def test_version_is_that_of_the_package():
    assert f"version = {mars_hf.__version__}\n" in (ROOT / "setup.cfg").read_text()


def test_generation_does_not_load_trl():
    code = "import sys; from mars_hf import AutoMarsModelForCausalLM; sys.exit('trl' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_library_does_not_print(path: Path):
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize(
    ("module", "package", "extra"), [("serve", "fastapi", "serve"), ("lm_eval", "lm_eval", "lm-eval")]
)
def test_the_extra_of_a_missing_package_is_named(monkeypatch, module, package, extra):
    monkeypatch.delitem(sys.modules, f"mars_hf.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"pip install -e '.[{extra}]'")):
        import_module(f"mars_hf.{module}")
