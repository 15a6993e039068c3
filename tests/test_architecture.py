"""The floor plan: folders follow the flow of data, and no import goes against it."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ecgmatch_dist"
# From what everything rests on to what people call. A room may import from rooms before it, never from one behind it.
FLOW = (
    "__init__",
    "errors",
    "files",
    "terminal",
    "web",
    "resources",
    "keyed",
    "config",
    "distributed",
    "data",
    "augment",
    "network",
    "bank",
    "losses",
    "metrics",
    "forecast",
    "evaluate",
    "measurements",
    "methods",
    "learner",
    "recovery",
    "record",
    "presets",
    "readiness",
    "run",
    "arguments",
    "train",
    "predict",
    "label",
    "serve",
    "export",
    "report",
    "launch",
    "doctor",
    "capacity",
    "bench",
    "demo",
    "api",
    "cli",
    "__main__",
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(name: str) -> str:
    """ecgmatch_dist.data.order -> data."""
    return [*name.split("."), "__init__"][1]


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, also inside functions; not those that only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name) else node.module for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "ecgmatch_dist"}


def is_module(name: str) -> bool:
    place = PACKAGE.parent / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_room_has_its_place() -> None:
    assert {room(module_name(path)) for path in MODULES} == set(FLOW)


def test_the_floor_plan_that_people_read_is_this_one() -> None:
    """CONTRIBUTING.md: every room, in the order of FLOW."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    rows = [line for line in text.partition("## The floor plan")[2].splitlines() if line.startswith("    ")]
    shown = [word for row in rows for word in row.strip().split("   ")[0].split()]
    assert shown == [name for name in FLOW if not name.startswith("__")]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_import_goes_against_the_flow(path: Path) -> None:
    here = room(module_name(path))
    back = [name for name in imports(path) if FLOW.index(room(name)) > FLOW.index(here)]
    assert not back, f"{module_name(path)} imports {', '.join(back)}, which come after `{here}` in FLOW"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=lambda path: path.name)
def test_no_circle_inside_a_room(folder: Path) -> None:
    graph = {module_name(path): imports(path) for path in folder.glob("*.py") if path.stem != "__init__"}
    done: set[str] = set()
    while ready := [
        name for name, needs in graph.items() if name not in done and not (needs & graph.keys()) - done - {name}
    ]:
        done |= set(ready)
    assert done == graph.keys(), f"these import each other: {', '.join(sorted(graph.keys() - done))}"


def test_sizes() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert [path for path, count in lines.items() if count > 350] == []
    assert statistics.median(lines.values()) <= 130
    assert len(list(PACKAGE.glob("*.py"))) <= 20


def test_no_test_file_imports_another() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = [
            f"{node.module}.{alias.name}"
            for node in nodes
            for alias in node.names
            if (node.module or "").startswith("tests")
        ]
        assert not [name for name in names if ".test_" in name], path


SLOW_TO_IMPORT = {
    # What these commands must not import before they need it, in an order in which each list is part of the one before.
    "data.download": {"aiohttp", "faiss", "matplotlib", "pandas", "scipy", "sklearn", "torch"},
    "data.splits": {"aiohttp", "faiss", "matplotlib", "scipy.signal", "sklearn.ensemble", "torch"},
    "launch.status": {"aiohttp", "faiss", "matplotlib", "scipy.signal", "sklearn.ensemble", "torch._dynamo"},
    "train": {"aiohttp", "faiss", "matplotlib", "scipy.signal", "sklearn.ensemble", "torch._dynamo"},
    "predict.command": {"aiohttp", "faiss", "matplotlib", "scipy.signal", "sklearn.ensemble", "torch._dynamo"},
    "report": {"aiohttp", "faiss", "scipy.signal", "sklearn.ensemble", "torch._dynamo"},
}


def test_commands_do_not_import_what_is_slow_and_not_needed() -> None:
    """The compiler alone takes two seconds, SciPy's signals one and a half: of every command, also of a mistake in it."""
    code = "import sys\n" + "".join(f"import ecgmatch_dist.{name}; print(*sys.modules)\n" for name in SLOW_TO_IMPORT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for (name, slow), line in zip(SLOW_TO_IMPORT.items(), done.stdout.splitlines(), strict=True):
        assert not slow & set(line.split()), f"ecgmatch_dist.{name}"
