"""What imports what: importing zeroelastic is cheap and changes nothing, and imports run one way."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from places import GOLDEN, ROOT

import zeroelastic

PACKAGE = Path(zeroelastic.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def listed(header: str) -> list[list[list[str]]]:
    """The names in the first two cells of each row of the page's table whose header begins so."""
    table = PAGE.split(f"| {header}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]] for line in table]


LEVELS = [{"" if name == "zeroelastic" else name for name in names} for names, _ in listed("imports from above")]
"""The packages from the ground up; each imports only from levels below. "" is the package itself."""

ROOMS = {package: rooms for (package, *_), rooms in listed("package | rooms")}
"""The rooms of a package that has some, in the same order; other modules of it stand above them."""

SEPARATE = [("deepspeed", "verbs")]
"""Packages that do not import each other, although their levels would allow it."""

INSIDE = {
    "elastic": {
        "core.world_size", "deepspeed.engine", "deepspeed.engine_state",
        "deepspeed.seams", "deepspeed.wrappers", "deepspeed.load.tag_choice",
        "deepspeed.node_local.node_tags", "deepspeed.client_state", "deepspeed.save.background",
        "distributed.collective", "distributed.partners", "errors", "io.paths", "observers", "report",
        "runs.names", "runs.tags", "runs.verdicts",
    },
    "integrations": {
        "zeroelastic", "checkpoint.open", "core.world_size", "deepspeed.engine", "deepspeed.live.kinds",
        "deepspeed.options", "deepspeed.patching", "deepspeed.save.background", "distributed.collective",
        "elastic.batch_plan", "elastic.position", "elastic.sampler", "errors", "report",
        "runs.names", "torch_file.header",
    },
    "testing": {"errors", "zeroelastic"},
}  # fmt: skip
"""What the packages on top import: these modules and nothing else of the inside. ``elastic.memory`` is a save, and the
module ``framework_checkpoints`` is what the front ends have in place of the inside."""

ANYTHING = ("zeroelastic.elastic.memory", "zeroelastic.integrations.framework_")

PURE_PACKAGES = ("core", "checkpoint")
PURE = ("errors", "report", "torch_file/safe_unpickler", "torch_file/header",
        "executors/tables", "executors/numpy_executor")  # fmt: skip
KNOWS_DEEPSPEED = {"deepspeed", "testing"}


@functools.cache
def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not any(part.startswith(".") for part in path.parts))


def unit(dotted: str) -> str:
    """The module or folder of the package that a dotted name belongs to: "zeroelastic.core.plan" -> "core"."""
    return dotted.split(".")[1] if dotted.startswith("zeroelastic.") else ""


def own_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside functions."""
    return imported_by(path, ast.walk(ast.parse(path.read_text())))


def imported_by(path: Path, nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inside if _is_module(name)} or {node.module}
    return found


def imports_at_the_top(path: Path) -> set[str]:
    """Every module that a file imports while it is itself imported."""
    return imported_by(path, ast.parse(path.read_text()).body)


@functools.cache
def _is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return dotted.startswith("zeroelastic.") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def level(name: str) -> int:
    for number, members in enumerate(LEVELS):
        if name in members:
            return number
    pytest.fail(f"zeroelastic/{name} has no place in the import direction; give it one in docs/architecture.md")


def test_imports_run_one_way():
    wrong = [
        f"{own_name(path)} imports {name} against the direction"
        for path in modules()
        for name in imports(path)
        if name.partition(".")[0] == "zeroelastic"
        and unit(name) != unit(own_name(path))
        and level(unit(name)) >= level(unit(own_name(path)))
    ]
    assert not wrong


def room(dotted: str) -> int:
    """The place of a module among the rooms of its package, from the ground up."""
    parts = dotted.split(".")
    order = ROOMS.get(unit(dotted), [])
    return order.index(parts[2]) if len(parts) > 2 and parts[2] in order else len(order)


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_of_a_package_import_one_way(package):
    wrong = []
    for path in modules():
        here = own_name(path)
        if unit(here) == package:
            inside = {name for name in imports(path) if unit(name) == package}
            wrong += [f"{here} imports {name}" for name in inside if room(name) > room(here)]
    assert not wrong


@pytest.mark.parametrize(("package", "other"), SEPARATE)
def test_these_packages_do_not_know_each_other(package, other):
    for path in modules():
        if unit(own_name(path)) in (package, other):
            apart = {package, other} - {unit(own_name(path))}
            assert not [name for name in imports(path) if unit(name) in apart], path


@pytest.mark.parametrize("package", INSIDE)
def test_packages_on_top_import_these_modules_alone(package: str) -> None:
    used = set()
    for path in modules():
        here = own_name(path)
        if unit(here) == package and not here.startswith(ANYTHING):
            names = {name for name in imports(path) if name.partition(".")[0] == "zeroelastic"}
            used |= {name.removeprefix("zeroelastic.") for name in names if unit(name) != package}
    assert used == INSIDE[package]


def test_no_module_imports_itself_through_others():
    graph = {own_name(path): set() for path in modules()}
    for path in modules():
        graph[own_name(path)] = {name for name in imports_at_the_top(path) if name in graph}
    left = dict(graph)
    while left:
        free = [name for name, needed in left.items() if not needed & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]


def test_every_package_says_what_is_in_it():
    silent = [path for path in PACKAGE.rglob("*/__init__.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def with_large(paths: Iterable[Path], *large: str) -> list[str]:
    """Which of these modules import one of the large packages."""
    return [own_name(path) for path in paths if not {name.split(".")[0] for name in imports(path)}.isdisjoint(large)]


def test_only_these_packages_import_deepspeed():
    assert not with_large((path for path in modules() if unit(own_name(path)) not in KNOWS_DEEPSPEED), "deepspeed")


def test_pure_modules_import_neither_torch_nor_deepspeed():
    pure = [PACKAGE / f"{name}.py" for name in PURE]
    pure += [path for name in PURE_PACKAGES for path in (PACKAGE / name).glob("*.py")]
    assert not with_large(pure, "torch", "deepspeed")


def test_saves_and_loads_do_not_reach_into_the_optimizer() -> None:
    """They know it only as a ``LiveOptimizer``."""
    kinds = ("deepspeed.runtime.zero.stage", "zeroelastic.deepspeed.live.stage", "zeroelastic.deepspeed.live.group")
    rooms = [PACKAGE / "deepspeed" / room for room in ("load", "save", "node_local")]
    for path in [path for path in modules() if path.parent in rooms]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(kinds), path
            if isinstance(node, ast.Attribute) and node.attr == "optimizer" and isinstance(node.value, ast.Name):
                assert node.value.id != "live", path


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


LARGE = ("torch", "deepspeed", "numpy", "fsspec")
LOADED = f"import sys; print(sorted({{name.split('.')[0] for name in sys.modules}} & {{*{LARGE}}}))"


def test_importing_zeroelastic_imports_none_of_the_large_ones():
    assert fresh(f"import zeroelastic; {LOADED}") == "[]\n"


def test_importing_zeroelastic_loads_no_native_library_of_ours_and_changes_nothing():
    code = (
        "import sys, os, signal, threading; before = dict(os.environ); import zeroelastic\n"
        "own = [l for l in open('/proc/self/maps') if '.so' in l and 'zeroelastic' in l.rsplit('/', 1)[-1]]\n"
        "print(own, dict(os.environ) == before, threading.active_count(), zeroelastic.is_installed())\n"
        "zeroelastic.uninstall; print([m for m in sys.modules if m.startswith('zeroelastic.deepspeed')])"
    )
    assert fresh(code) == "[] True 1 False\n[]\n"


@pytest.mark.parametrize(
    "name",
    [
        "core.plan",
        "checkpoint.open",
        "verbs.plan",
        "executors.dispatch",
        "torch_file.archive",
        "testing",
        "cli.app",
    ],
)
def test_these_work_without_torch_and_deepspeed(name):
    assert fresh(f"import zeroelastic.{name}; {LOADED}") in ("[]\n", "['numpy']\n")


GOLDEN_TAGS = f"import pathlib; golden = pathlib.Path({str(GOLDEN)!r}); import zeroelastic\n"


@pytest.mark.parametrize(
    "code",
    [
        "for name in ('stage2_rank2', 'rigid3', 'elastic3'): zeroelastic.inspect(golden / name, all_ranks=True)",
        "with zeroelastic.open(golden / 'elastic3') as ck: ck['inner.weight'][1:].numpy(), ck.client_state",
        "zeroelastic.reshard(golden / 'rigid2', 'out', world_size=3)",
        "zeroelastic.verify(golden / 'stage2_rank2')",
    ],
)
def test_checkpoints_of_this_machine_are_read_and_written_with_numpy_alone(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fresh(f"{GOLDEN_TAGS}{code}\n{LOADED}") == "['numpy']\n"


def test_the_activation_imports_next_to_nothing():
    """Every Python process of an environment with ZEROELASTIC=1 imports it."""
    code = "import sys; before = {*sys.modules}; import zeroelastic.activation; print(sorted({*sys.modules} - before))"
    assert fresh(code) == "['zeroelastic', 'zeroelastic._version', 'zeroelastic.activation']\n"


def test_every_public_name_is_there():
    for name in zeroelastic.__all__:
        assert getattr(zeroelastic, name) is not None
    assert sorted(zeroelastic.__all__) == list(zeroelastic.__all__)


def test_every_error_is_under_one_root_and_refines_a_builtin():
    errors = [
        value
        for value in vars(zeroelastic).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value is not zeroelastic.ZeroElasticError
    ]
    assert len(errors) >= 10
    for error in errors:
        assert issubclass(error, zeroelastic.ZeroElasticError)
        assert issubclass(error, (ValueError, RuntimeError, NotImplementedError, OSError, ImportError)), error


def test_a_layout_mismatch_lists_every_problem():
    error = zeroelastic.LayoutMismatchError("does not fit:", iter(["one", "two"]))
    assert error.problems == ("one", "two") and str(error) == "does not fit:\n  - one\n  - two"


def test_dir_lists_what_is_imported_when_it_is_asked_for() -> None:
    assert set(zeroelastic.__all__) <= set(dir(zeroelastic))
