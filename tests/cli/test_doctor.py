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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from documentation import documented_keys
from packaging.version import Version
from places import ROOT

import zeroelastic
from zeroelastic.cli.doctor import _ask, compiled_ops
from zeroelastic.cli.documents import check
from zeroelastic.executors.build_info import REMEDIES
from zeroelastic.executors.dispatch import describe_build

BUILD = describe_build("native")
built = pytest.mark.skipif(not BUILD.usable, reason=f"the native engine is not built: {BUILD.reason}")
MIB = 1 << 20


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
    return subprocess.run(
        [sys.executable, *python, *start, "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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
    ("quiet_s", "is_open", "source", "stale"),
    [
        (5000, False, "baton = FileBaton(path)", True),
        (5000, True, "baton = FileBaton(path)", False),
        (60, False, "baton = FileBaton(path)", False),
        (5000, False, "with FileLock(path):", False),
    ],
    ids=["left", "held", "just now", "torch 2.14"],
)
def test_a_lock_is_stale_only_where_nobody_can_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_s: float, is_open: bool, source: str, stale: bool
) -> None:
    """torch 2.14 leaves the file after every build, and the kernel releases the lock."""
    torch = tmp_path / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "utils/cpp_extension.py").write_text(source)
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace(origin=str(torch / "__init__.py")))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock = tmp_path / "ops" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - quiet_s,) * 2)
    with open(lock) if is_open else nullcontext():
        assert compiled_ops() == ([], [str(lock)] * stale)


@pytest.mark.extended
@pytest.mark.skipif(Version(torch.__version__).release >= (2, 14), reason="this torch waits for no lock file")
def test_a_lock_that_a_killed_build_left_is_a_problem_that_names_it(quick: Path, tmp_path: Path) -> None:
    lock = tmp_path / "ops" / "py311_cpu" / "cpu adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 5000,) * 2)
    done = doctor(path=[quick], TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert done.returncode == 1 and f"remove it: rm '{lock}'" in done.stdout


@built
def test_the_native_engine_is_described(quick: Path) -> None:
    native = document(doctor("--json", path=[quick], ZEROELASTIC_THREADS="3"))["components"]["native"]
    assert native["state"] == "usable" and native["about"].startswith(("gcc", "clang"))
    assert native["about"].endswith("; 3 threads") and "plain" in native["about"]


def test_for_people_it_says_the_same(quick: Path) -> None:
    done = doctor(path=[quick])
    assert done.returncode == 1 and done.stderr == "" and "\x1b" not in done.stdout
    assert f"  zeroelastic   {zeroelastic.__version__}\n" in done.stdout
    assert re.search(r"^  deepspeed  broken .*exited with 1; .*: ImportError: a stand-in\.", done.stdout, re.MULTILINE)
    assert "To fix\n  deepspeed: the process" in done.stdout and done.stdout.endswith("Not usable as it is.\n")


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
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


def damage_text(library: Path) -> None:
    library.write_text("not a library")


def damage_truncated(library: Path) -> None:
    """As a full disk leaves it. Loading it kills the process with SIGBUS."""
    if not BUILD.usable:
        pytest.skip("there is no library to truncate")
    library.write_bytes(BUILD.path.read_bytes()[:20_000])


def damage_foreign(library: Path) -> None:
    """Some library, but not ours."""
    path = next(Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so"))
    shutil.copy(path, library)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (damage_text, "native"), (damage_foreign, "cuda"), (damage_truncated, "native"), (damage_truncated, "cuda"),
    ],
)  # fmt: skip
def test_a_damaged_library_is_a_problem_with_a_remedy(quick: Path, tmp_path: Path, damage: object, name: str) -> None:
    copy = package_copy(tmp_path)
    library = copy / f"zeroelastic/_{name}.so"
    damage(library)
    found = document(doctor("--json", path=[quick, copy]))
    engine = found["components"][name]
    assert engine["state"] == "broken" and REMEDIES[name] in engine["about"]
    assert f"{name}: {engine['about']}" in found["problems"]
    other = {"native": "cuda", "cuda": "native"}[name]
    assert found["components"][other]["state"] == "missing", "one engine's crash hides nothing of the other"
    assert ("SIG" if damage is damage_truncated else str(library)) in engine["about"]


@built
def test_a_library_from_an_older_build_is_a_problem(quick: Path, tmp_path: Path) -> None:
    copy = package_copy(tmp_path)
    shutil.copy(BUILD.path, copy / "zeroelastic")
    info = copy / "zeroelastic/executors/build_info.py"
    text = re.sub(r"^ABI_VERSION = \d+", "ABI_VERSION = 99", info.read_text(), flags=re.MULTILINE)
    info.write_text(text)
    native = document(doctor("--json", path=[quick, copy]))["components"]["native"]
    assert native["state"] == "broken" and "left from an older build" in native["about"]


@built
def test_a_number_of_threads_that_is_none_is_a_problem(quick: Path) -> None:
    found = document(doctor("--json", path=[quick], ZEROELASTIC_THREADS="many"))
    assert any("ZEROELASTIC_THREADS is 'many'" in problem for problem in found["problems"])


# --- packages -------------------------------------------------------------------------------------------------------


@contextmanager
def site_without(folder: Path, *left_out: str) -> Iterator[Path]:
    """Links to everything that is installed but some packages, for ``python -S``."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("zeroelastic", *(f"{name}{end}" for name in left_out for end in ("-", "")))):
            (folder / path.name).symlink_to(path)
    yield folder


def test_without_deepspeed_it_is_usable_for_looking_at_checkpoints(tmp_path: Path) -> None:
    with site_without(tmp_path / "site", "deepspeed") as site:
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
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'."),
        ("os.kill(os.getpid(), 11)", "the process that loads it was killed by SIGSEGV;"),
        ("sys.stderr.write('gone\\n\\n'); os._exit(7)", "exited with 7; it said last: gone."),
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


@pytest.mark.extended
def test_noise_on_import_stays_out_of_results_that_are_sound(tmp_path: Path) -> None:
    """The real one, behind a module that prints."""
    folder = write_package(tmp_path, {"noise.py": NOISE})
    hook = f"import sys; sys.path.insert(0, {str(folder)!r})"
    (folder / "sitecustomize.py").write_text("import noise\n")
    done = doctor("--json", code=hook, path=[folder])
    text = "to stdout\n"
    assert done.stdout.startswith(("to the descriptor", text)), "the control: the hook does print in this process"
    found = json.loads(done.stdout.replace(text, "").replace("to the descriptor\n", ""))
    assert found["components"]["deepspeed"]["state"] == "usable" and done.stderr == "to stderr\n"


def fake_deepspeed(folder: Path, *, missing: str = "", renamed: str = "") -> Path:
    """Classes that have the methods we know, but for one that is missing or has its last parameter renamed."""
    from zeroelastic.deepspeed.install.seams import SEAMS, USED

    files: dict[str, dict[str, list[str]]] = {}
    for seam in (*SEAMS, *USED):
        module, _, owner = seam.class_path.rpartition(".")
        classes = files.setdefault(module.replace(".", "/") + ".py", {})
        lines = classes.setdefault(owner, [f"class {owner}:", "    pass"])
        parameters = list(seam.parameters)
        if seam.method == renamed:
            parameters[-1] += "_2"
        if seam.method != missing:
            lines.append(f"    def {seam.method}({', '.join(parameters)}): pass")
    texts = {name: "\n".join(line for lines in classes.values() for line in lines) for name, classes in files.items()}
    return write_package(folder, texts)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "name", "problem"),
    [
        ({"missing": "_get_all_ckpt_names"}, "DeepSpeedEngine._get_all_ckpt_names", "does not exist"),
        ({"missing": "get_param_id"}, "DeepSpeedZeroOptimizer_Stage3.get_param_id", "does not exist"),
        (
            {"renamed": "save_checkpoint"},
            "DeepSpeedEngine.save_checkpoint",
            "has no parameter exclude_frozen_parameters",
        ),
    ],
)
def test_a_changed_seam_is_a_problem_that_names_it(
    tmp_path: Path, change: dict[str, str], name: str, problem: str
) -> None:
    folder = fake_deepspeed(tmp_path, **change)
    found = document(doctor("--json", path=[folder]))
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "broken"
    assert {seam: text for seam, text in deepspeed["seams"].items() if text} == {name: problem}
    # install() says the same: the two checks cannot drift apart unnoticed.
    assert f"{name} {problem}. Nothing was changed." in deepspeed["about"]
    assert "Use a tested version" in found["problems"][-1]


def test_a_module_that_moved_is_a_problem(tmp_path: Path) -> None:
    folder = fake_deepspeed(tmp_path)
    (folder / "deepspeed/runtime/zero/stage3.py").unlink()
    found = document(doctor("--json", path=[folder]))
    deepspeed = found["components"]["deepspeed"]
    assert deepspeed["state"] == "broken"
    gone = "does not exist (there is no deepspeed.runtime.zero.stage3)"
    assert deepspeed["seams"]["DeepSpeedZeroOptimizer_Stage3.state_dict"] == gone
    assert f"DeepSpeedZeroOptimizer_Stage3.state_dict {gone}" in deepspeed["about"]
    assert deepspeed["seams"]["DeepSpeedEngine.load_checkpoint"] == ""


def test_a_deepspeed_that_is_too_old_is_a_problem(tmp_path: Path) -> None:
    folder = fake_deepspeed(tmp_path)
    (folder / "deepspeed-0.16.9.dist-info").mkdir()
    (folder / "deepspeed-0.16.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.9\n"
    )
    found = document(doctor("--json", path=[folder]))
    assert found["versions"]["deepspeed"] == "0.16.9"
    assert "0.16.9 is too old" in found["components"]["deepspeed"]["about"]


def test_what_lies_in_the_current_directory_is_not_brought_in(quick: Path, tmp_path: Path) -> None:
    """The console script does not have the current directory on its path, so its probes must not either."""
    here = write_package(
        tmp_path / "here", {"numpy/__init__.py": "raise RuntimeError('from here')", "json.py": "1 / 0"}
    )
    code = "import sys; del sys.path[0]"
    found = document(doctor("--json", path=[quick], code=code, cwd=here))
    assert {found["components"][name]["state"] for name in REMEDIES} <= {"usable", "missing"}


def test_a_component_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.syspath_prepend(write_package(tmp_path, {"deepspeed/__init__.py": text}))
    monkeypatch.setattr("zeroelastic.cli.doctor._LIMIT_S", 5.0)
    found = _ask("deepspeed")
    assert found.state == "broken" and found.about == "looking at it did not end within 5 s"
    wait_for(lambda: has_ended((tmp_path / "pid").read_text()))


def test_ctrl_c_while_deepspeed_is_imported_ends_that_too(tmp_path: Path) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    folder = write_package(tmp_path, {"deepspeed/__init__.py": text})
    with started(path=folder) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "") and "Traceback" not in stderr
    wait_for(lambda: has_ended((tmp_path / "pid").read_text()))


@contextmanager
def started(*, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Doctor in the background, with the handler of Ctrl-C that a shell's job control would leave it."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from zeroelastic.cli.app import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor"],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_ended(pid: str) -> bool:
    """Whether a process is gone, or waits for nothing but its parent."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() == b""
    except FileNotFoundError:
        return True


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
