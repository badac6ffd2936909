"""The law of imports: models and runtime import nothing of ours but errors, exporter imports both,
cli imports commands lazily, nothing imports in a circle, and what runs a bundle needs no torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tfx

ROOT = Path(tfx.__file__).parent
FOLDERS = ("models", "exporter", "runtime")
EXPORT_ONLY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers")
MAX_LINES = 400

# folder (or top-level module) -> what of ours it may import
MAY_IMPORT = {
    "errors": set(),
    "__init__": {"models", "exporter", "runtime", "errors"},  # under TYPE_CHECKING only
    "cli": {"errors", "__init__"},
    "models": {"models", "errors"},
    "runtime": {"runtime", "errors", "__init__"},
    "exporter": {"exporter", "models", "runtime", "errors", "__init__"},
}


def sources() -> list[Path]:
    return [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]


def module_name(path: Path) -> str:
    parts = ["tfx", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources()}


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module but those for the type checker, functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        else:
            yield from statements(node)


def imported(name: str) -> set[str]:
    """Full dotted names that a module imports, relative ones resolved."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            found.add(whole if whole in MODULES else base)
    return found


def ours(name: str) -> set[str]:
    return {other for other in imported(name) if other in MODULES} - {name}


def house(name: str) -> str:
    """The folder of a module, or its own name at the top level."""
    return "__init__" if name == "tfx" else name.split(".")[1]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str):
    allowed = MAY_IMPORT[house(name)]
    wrong = {other for other in ours(name) if house(other) not in allowed}
    assert not wrong, f"{name} may import {sorted(allowed)} only"


def ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def test_no_circles():
    # Importing a.b runs a/__init__ first. An import hidden in a function still makes a circle.
    graph = {
        name: {each for other in ours(name) for each in {other, *ancestors(other)}} - ancestors(name) - {name}
        for name in MODULES
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_absolute_imports_of_ourselves():
    wrong = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "tfx" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "tfx")
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for name in MODULES if house(name) in ("runtime", "cli", "errors", "__init__")])
def test_what_runs_a_bundle_never_imports_what_exports_it(name: str):
    wrong = {other for other in imported(name) if other.split(".")[0] in EXPORT_ONLY}
    assert not wrong


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", MODULES)
def test_exported_members_exist_and_are_named_once(name: str):
    module = importlib.import_module(name)
    exported: list[str] = list(getattr(module, "__all__", []))
    assert len(set(exported)) == len(exported)
    for member in exported:
        assert hasattr(module, member), f"{name}.__all__ names {member}, which is not there"


def test_public_names():
    assert tfx.__all__ == [
        "Bundle",
        "Encoder",
        "EncoderConfig",
        "Pooled",
        "Schedule",
        "Session",
        "Source",
        "TfxError",
        "__version__",
        "checkpoint",
        "export",
        "module",
        "optimize",
        "reference",
        "verify_bundle",
    ]
    assert dir(tfx) == sorted(tfx.__all__)
    for name in tfx.__all__:
        assert getattr(tfx, name) is not None
    with pytest.raises(AttributeError, match="module 'tfx' has no attribute 'nothing'"):
        _ = tfx.nothing  # pyright: ignore[reportAttributeAccessIssue]


def python(code: str, *, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which importing any of `blocked` fails as if not installed."""
    block = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_runtime_imports_without_the_export_packages():
    names = [name for name in MODULES if house(name) in ("runtime", "cli", "errors", "__init__")]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('imported')"
    done = python(code, blocked=EXPORT_ONLY)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


def test_help_imports_nothing_heavy():
    code = "from tfx.cli import main\nmain(['--help'], prog_name='tfx')"
    done = python(code, blocked=(*EXPORT_ONLY, "onnxruntime", "numpy", "tokenizers", "safetensors", "rich"))
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout


@pytest.mark.parametrize("command", ["run", "verify", "embed", "serve", "bench", "doctor"])
def test_help_of_runtime_commands_without_the_export_packages(command: str):
    code = f"from tfx.cli import main\nmain([{command!r}, '--help'], prog_name='tfx')"
    done = python(code, blocked=(*EXPORT_ONLY, "onnxruntime"))
    assert done.returncode == 0, done.stderr
    assert f"Usage: tfx {command}" in done.stdout


def test_export_without_torch_says_the_pip_line():
    code = "from tfx.cli import main\nmain(['export', '--d-model', '24', '--heads', '4'], prog_name='tfx')"
    done = python(code, blocked=EXPORT_ONLY)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert 'pip install "tfx-onnx[export]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
