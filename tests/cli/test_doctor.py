"""zeroelastic doctor: a real process in sound and broken environments."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import check
from places import ROOT
from programs import documented_keys, is_running, run_python, wait_for

import zeroelastic
from zeroelastic import compiled_ops
from zeroelastic.cli.doctor import Component, _ask, diagnose
from zeroelastic.executors.build_info import REMEDIES
from zeroelastic.executors.dispatch import describe_build

BUILD = describe_build("native")
built = pytest.mark.skipif(not BUILD.usable, reason=f"the native engine is not built: {BUILD.reason}")


def doctor(
    *arguments: str,
    path: Sequence[Path] = (),
    python: Sequence[str] = (),
    code: str = "",
    cwd: Path = Path("/"),
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run it with ``path`` in front of the module path and ``code`` run before it."""
    start = ["-c", f"{code}\nfrom zeroelastic.cli.app import main; main()"] if code else ["-m", "zeroelastic"]
    return run_python(*python, *start, "doctor", *arguments, path=[*path, ROOT], cwd=cwd, **env)


def document(done: subprocess.CompletedProcess[str]) -> dict:
    """The JSON document of a run. Holds that there is nothing else, and that the exit code agrees with it."""
    found = json.loads(done.stdout)
    check("doctor", done.stdout)
    assert found["ok"] == (done.returncode == 0) == (found["problems"] == []), done.stdout + done.stderr
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr
    return found


def keys(value: object, prefix: str = "") -> set[str]:
    """The keys of a document, dotted; names of packages, components and methods are NAME."""
    if isinstance(value, dict) and value:
        named = prefix.endswith(("versions.", "places.", "components.", "seams."))
        return {key for name, inner in value.items() for key in keys(inner, f"{prefix}{'NAME' if named else name}.")}
    return {prefix[:-1]}


def package_copy(folder: Path) -> Path:
    """The package in another place, without its libraries and their logs."""
    ignore = shutil.ignore_patterns("*.so", "*.log", "__pycache__")
    shutil.copytree(Path(zeroelastic.__file__).parent, folder / "zeroelastic", ignore=ignore)
    return folder


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Modules in a folder for the module path, with the __init__.py that they need."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent / "__init__.py").touch()
    return folder


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """A DeepSpeed that fails at once, for tests of everything else."""
    return write_package(tmp_path / "quick", {"deepspeed/__init__.py": "raise ImportError('a stand-in')"})


# --- a sound environment --------------------------------------------------------------------------------------------


def test_a_sound_environment_is_usable_and_the_document_has_the_documented_keys(tmp_path: Path) -> None:
    folder = tmp_path / "ops" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").touch()
    done = doctor("--json", TORCH_EXTENSIONS_DIR=str(folder.parent))
    found = document(done)
    assert found["ok"] and done.stderr == ""
    assert keys(found) - {f"components.NAME.seams{end}" for end in ("", ".NAME")} == {
        key for key in documented_keys("doctor") if "seams" not in key
    }
    assert found["versions"]["zeroelastic"] == zeroelastic.__version__
    assert found["places"]["package"] == str(Path(zeroelastic.__file__).parent)
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "usable"
    assert deepspeed["seams"]["DeepSpeedEngine.load_checkpoint"] == ""
    assert deepspeed["seams"]["DeepSpeedZeroOptimizer_Stage3._rigid_state_dict"] == ""
    assert not any(deepspeed["seams"].values())
    assert found["ops"] == ["cpu_adam"] and found["stale_locks"] == []


@pytest.mark.parametrize(
    ("held", "source", "left"),
    [(False, "FileBaton(path)", True), (True, "FileBaton(path)", False), (False, "FileLock(path)", False)],
    ids=["left", "held", "torch 2.14"],
)
def test_a_lock_that_no_process_has_open_is_named_with_the_command_that_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool, source: str, left: bool
) -> None:
    """torch 2.14 leaves the file after every build, and the kernel releases the lock."""
    torch = tmp_path / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "utils/cpp_extension.py").write_text(source)
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace(origin=str(torch / "__init__.py")))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setattr("zeroelastic.cli.doctor._ask", lambda name: Component(state="missing", about=""))
    lock = tmp_path / "ops" / "py311_cpu" / "cpu adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with lock.open() if held else nullcontext():
        found = diagnose()
    assert found.stale_locks == [str(lock)] * left
    assert len(found.problems) == left and all(f"remove it: rm '{lock}'" in problem for problem in found.problems)


@pytest.mark.parametrize("again", [False, True], ids=["released", "taken again"])
def test_a_lock_that_is_released_while_processes_are_asked_was_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Ranks of a node take the lock of an op one after the other."""
    torch = tmp_path / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "utils/cpp_extension.py").write_text("FileBaton(path)")
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace(origin=str(torch / "__init__.py")))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()

    def asked() -> frozenset[str]:
        lock.unlink()
        if again:
            lock.touch()
        return frozenset()

    assert list(compiled_ops.left_locks()) == [lock]
    monkeypatch.setattr(compiled_ops, "_open_files", asked)
    assert compiled_ops.left_locks() == {}


def test_for_people_it_says_the_same(quick: Path) -> None:
    done = doctor(path=[quick])
    assert done.returncode == 1 and done.stderr == "" and "\x1b" not in done.stdout
    assert f"  zeroelastic   {zeroelastic.__version__}\n" in done.stdout
    assert re.search(r"^  deepspeed  broken .*exited with 1; .*: ImportError: a stand-in\.", done.stdout, re.MULTILINE)
    assert "To fix\n  deepspeed: the process" in done.stdout and done.stdout.endswith("Not usable as it is.\n")


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        pytest.param({"TERM": "dumb"}, False, marks=pytest.mark.extended),
    ],
)
def test_colours_are_for_terminals_and_NO_COLOR_is_honoured(quick: Path, env: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "zeroelastic", "doctor"],
        env={**clean, "PYTHONPATH": f"{quick}{os.pathsep}{ROOT}", "TERM": "xterm-256color", **env},
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # how Linux says that nobody has the other side any more
        pass
    assert process.wait(60) == 1
    os.close(ours)
    assert b"Components" in shown and bool(re.search(rb"\x1b\[(1;)?3\dm", shown)) == coloured


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_without_libraries_it_says_why_not_and_how_to_build_them(quick: Path, tmp_path: Path) -> None:
    copy = package_copy(tmp_path)
    (copy / "zeroelastic/_native.log").write_text("there was no C++ compiler on the PATH\nmore\n")
    found = document(doctor("--json", path=[quick, copy]))
    assert found["places"]["package"] == str(copy / "zeroelastic")
    native, cuda = (found["components"][name] for name in ("native", "cuda"))
    assert native["state"] == cuda["state"] == "missing"
    assert native["about"].startswith("there was no C++ compiler on the PATH. Install a C++17 compiler")
    assert "ZEROELASTIC_BUILD_NATIVE=1 pip install" in native["about"]
    assert native["about"].endswith(f"Log of the build: {copy / 'zeroelastic/_native.log'}")
    assert cuda["about"].startswith("it was not built. ") and "zeroelastic doctor --build-cuda" in cuda["about"]
    assert [problem for problem in found["problems"] if "deepspeed" not in problem] == [], "no engine is an obligation"
    shown = doctor(path=[quick, copy])
    assert re.search(r"^  native +missing +there was no C\+\+ compiler", shown.stdout, re.MULTILINE)
    assert shown.stderr == "", "what is a result is not also a warning"


NVCC = """\
#!/bin/sh
echo "$@" > "$0.arguments"
while [ "$1" != -o ]; do shift; done
cp "$LIBRARY" "$2"
"""


def installed_copy(folder: Path) -> Path:
    """The package as a wheel without the CUDA engine installs it: with the sources."""
    copy = package_copy(folder)
    ignore = shutil.ignore_patterns("tests", "build", "Makefile")
    shutil.copytree(ROOT / "csrc", copy / "zeroelastic/csrc", ignore=ignore)
    return copy


def tools(folder: Path, **programs: str) -> str:
    """A PATH with these programs, and those of the system that shell scripts use."""
    folder.mkdir()
    for name in ("sh", "cp", "uname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder)


@built
@pytest.mark.extended
def test_build_cuda_compiles_the_engine_into_the_installed_package(quick: Path, tmp_path: Path) -> None:
    copy = installed_copy(tmp_path / "site")
    path = tools(tmp_path / "bin", nvcc=NVCC)
    done = doctor("--build-cuda", "--json", path=[quick, copy], PATH=path, LIBRARY=str(BUILD.path))
    assert document(done)["components"]["cuda"]["state"] == "usable" and (copy / "zeroelastic/_cuda.so").is_file()
    arguments = (tmp_path / "bin/nvcc.arguments").read_text().split()
    compiled = {argument for argument in arguments if argument.startswith("csrc/")}
    assert {
        "csrc/cuda/segments.cu",
        "csrc/cuda/device_read.cpp",
        "csrc/cuda/device_write.cpp",
        "csrc/read.cpp",
    } < compiled
    assert "csrc/api.cpp" not in compiled and "-shared" in arguments
    assert done.stderr.startswith("/") and "segments.cu" in done.stderr, "the command is shown while it runs"


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, "error: the CUDA engine was not built: there was no nvcc on the PATH"),
        (
            {"nvcc": "#!/bin/sh\necho 'segments.cu(1): error: no such arch' >&2\nexit 2\n"},
            "failed with exit code 2: segments.cu(1): error: no such arch",
        ),
    ],
    ids=["no nvcc", "nvcc fails"],
)
def test_build_cuda_that_fails_says_why_and_leaves_the_library_as_it_was(
    quick: Path, tmp_path: Path, programs: dict[str, str], said: str
) -> None:
    copy = installed_copy(tmp_path / "site")
    library = copy / "zeroelastic/_cuda.so"
    library.write_text("the former one")
    done = doctor("--build-cuda", path=[quick, copy], PATH=tools(tmp_path / "bin", **programs))
    assert done.returncode == 1 and done.stdout == "" and said in done.stderr
    assert library.read_text() == "the former one" and not list(library.parent.glob("*.tmp"))


def some_library() -> bytes:
    """A library that is not ours."""
    return next(Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so")).read_bytes()


def cut_library() -> bytes:
    """As a full disk leaves it. Loading it kills the process with SIGBUS."""
    if not BUILD.usable:
        pytest.skip("there is no library to truncate")
    return BUILD.path.read_bytes()[:20_000]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (lambda: b"not a library", "native", "{library}"),
        pytest.param(some_library, "cuda", "{library}", marks=pytest.mark.extended),
        (cut_library, "native", "SIG"),
        pytest.param(cut_library, "cuda", "SIG", marks=pytest.mark.extended),
    ],
)
def test_a_damaged_library_is_a_problem_with_a_remedy(
    quick: Path, tmp_path: Path, content: Callable[[], bytes], name: str, said: str
) -> None:
    copy = package_copy(tmp_path)
    library = copy / f"zeroelastic/_{name}.so"
    library.write_bytes(content())
    found = document(doctor("--json", path=[quick, copy]))
    engine = found["components"][name]
    assert engine["state"] == "broken" and REMEDIES[name] in engine["about"]
    assert f"{name}: {engine['about']}" in found["problems"]
    other = {"native": "cuda", "cuda": "native"}[name]
    assert found["components"][other]["state"] == "missing", "one engine's crash hides nothing of the other"
    assert said.format(library=library) in engine["about"]


# --- packages -------------------------------------------------------------------------------------------------------


def test_without_deepspeed_it_is_usable_for_looking_at_checkpoints(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("zeroelastic", "deepspeed-")) and path.name != "deepspeed":
            (site / path.name).symlink_to(path)
    found = document(doctor("--json", path=[ROOT, site], python=["-S"]))
    assert found["ok"] and found["versions"]["deepspeed"] is None
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "missing" and "pip install 'zeroelastic[train]'" in deepspeed["about"]
    shown = doctor(path=[ROOT, site], python=["-S"])
    assert shown.returncode == 0 and "deepspeed  missing  training needs it" in shown.stdout


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

NOISE = (
    "import os, sys; print('to stdout'); print('to stderr', file=sys.stderr); os.write(1, b'to the descriptor\\n')\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libcudart.so.12: cannot\\nbe opened')", "exited with 1; it said last: be opened."),
        pytest.param(
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'.",
            marks=pytest.mark.extended,
        ),
        ("os.kill(os.getpid(), 11)", "the process that loads it was killed by SIGSEGV;"),
        pytest.param(
            "sys.stderr.write('gone\\n\\n'); os._exit(7)",
            "exited with 7; it said last: gone.",
            marks=pytest.mark.extended,
        ),
        ("sys.exit(0)", "exited with 0; it said last: to "),
    ],
)
def test_a_deepspeed_that_cannot_be_imported_is_a_problem_and_its_noise_stays_out(
    tmp_path: Path, text: str, reason: str
) -> None:
    folder = write_package(tmp_path, {"deepspeed/__init__.py": NOISE + text})
    done = doctor("--json", path=[folder])
    found = document(done)
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "broken" and reason in deepspeed["about"]
    assert "python -c 'import deepspeed'" in found["problems"][-1]
    assert done.stderr == ""


def fake_deepspeed(folder: Path, *, missing: str) -> Path:
    """Classes that have the methods we know, but for one."""
    from zeroelastic.deepspeed.seams import SEAMS, USED

    files: dict[str, dict[str, list[str]]] = {}
    for seam in (*SEAMS, *USED):
        module, _, owner = seam.class_path.rpartition(".")
        classes = files.setdefault(module.replace(".", "/") + ".py", {})
        lines = classes.setdefault(owner, [f"class {owner}:", "    pass"])
        if seam.method != missing:
            lines.append(f"    def {seam.method}({', '.join(seam.parameters)}): pass")
    texts = {name: "\n".join(line for lines in classes.values() for line in lines) for name, classes in files.items()}
    return write_package(folder, texts)


def test_a_changed_seam_is_a_problem_that_names_it(tmp_path: Path) -> None:
    """What each change is called, and a DeepSpeed that is too old, are the tests of install()."""
    folder = fake_deepspeed(tmp_path, missing="_get_all_ckpt_names")
    found = document(doctor("--json", path=[folder]))
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "broken"
    name = "DeepSpeedEngine._get_all_ckpt_names"
    assert {seam: text for seam, text in deepspeed["seams"].items() if text} == {name: "does not exist"}
    # install() says the same: the two checks cannot drift apart unnoticed.
    assert f"{name} does not exist. Nothing was changed." in deepspeed["about"]
    assert "Use a tested version" in found["problems"][-1]


def test_what_lies_in_the_current_directory_is_not_brought_in(quick: Path, tmp_path: Path) -> None:
    """The console script does not have the current directory on its path, so its probes must not either."""
    here = write_package(
        tmp_path / "here", {"numpy/__init__.py": "raise RuntimeError('from here')", "json.py": "1 / 0"}
    )
    code = "import sys; del sys.path[0]"
    found = document(doctor("--json", path=[quick], code=code, cwd=here))
    assert {found["components"][name]["state"] for name in REMEDIES} <= {"usable", "missing"}


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """A DeepSpeed whose import writes its process into the file ``pid`` and does not end."""
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    return write_package(tmp_path, {"deepspeed/__init__.py": text})


def test_a_component_that_hangs_is_given_up(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(hanging)
    monkeypatch.setattr("zeroelastic.cli.doctor._LIMIT_S", 5.0)
    found = _ask("deepspeed")
    assert found.state == "broken" and found.about == "looking at it did not end within 5 s"
    wait_for(lambda: not is_running((hanging / "pid").read_text()))


def test_ctrl_c_while_deepspeed_is_imported_ends_that_too(hanging: Path) -> None:
    # The handler of Ctrl-C that a shell's job control would leave it.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from zeroelastic.cli.app import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": f"{hanging}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code, "doctor"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: (hanging / "pid").exists() and (hanging / "pid").read_text())
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, stdout) == (130, "") and "Traceback" not in stderr
    wait_for(lambda: not is_running((hanging / "pid").read_text()))
