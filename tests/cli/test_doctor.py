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
from contextlib import contextmanager
from pathlib import Path

import pytest
from documentation import documented_keys
from places import ROOT

import zeroelastic
from zeroelastic.cli.documents import check
from zeroelastic.cli.machine import Probe, ProbeFailed
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
    """The keys of a document, dotted; the names of packages and engines are NAME."""
    if isinstance(value, dict) and value:
        named = prefix in ("versions.", "engines.")
        return {key for name, inner in value.items() for key in keys(inner, f"{prefix}{'NAME' if named else name}.")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {key for inner in value for key in keys(inner, f"{prefix[:-1]}[].")}
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
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w"):
        done = doctor("--json", TORCH_EXTENSIONS_DIR=str(lock.parents[1]))
    found = document(done)
    assert found["ok"] and done.stderr == ""
    assert keys(found) == set(documented_keys("doctor"))
    assert found["versions"]["zeroelastic"] == zeroelastic.__version__
    assert found["package"] == str(Path(zeroelastic.__file__).parent)
    assert found["executor"] == ("native" if BUILD.usable else "numpy")
    assert found["deepspeed"]["state"] == "usable"
    seams = {(seam["name"], seam["use"]): seam for seam in found["deepspeed"]["seams"]}
    assert seams["DeepSpeedEngine.load_checkpoint", "wrapped"]["found"][:3] == ["self", "load_dir", "tag"]
    assert seams["DeepSpeedZeroOptimizer_Stage3._rigid_state_dict", "called"]["problem"] == ""
    assert not any(seam["problem"] for seam in seams.values())
    assert [(entry["path"], entry["state"]) for entry in found["build_locks"]] == [(str(lock), "held")]


@pytest.mark.extended
def test_a_lock_that_a_killed_build_left_is_a_problem_that_names_it(quick: Path, tmp_path: Path) -> None:
    lock = tmp_path / "ops" / "py311_cpu" / "cpu adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 5000,) * 2)
    done = doctor(path=[quick], TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert re.search(rf"FAIL  left +{re.escape(str(lock))}, 50\d\d s old", done.stdout), done.stdout
    assert done.returncode == 1 and f"doctor --fix, or rm '{lock}'" in done.stdout
    done = doctor("--fix", path=[quick], TORCH_EXTENSIONS_DIR=str(tmp_path / "ops"))
    assert f"removed {lock}" in done.stderr and str(lock) not in done.stdout and not lock.exists()


@built
def test_the_native_engine_is_described(quick: Path) -> None:
    native = document(doctor("--json", path=[quick], ZEROELASTIC_THREADS="3"))["engines"]["native"]
    assert native["state"] == "usable" and native["reason"] == native["remedy"] == ""
    assert native["threads"] == 3 and native["instruction_set"] in ("plain", "avx2", "avx512")
    assert native["compiler"].startswith(("gcc", "clang")) and "plain" in native["targets"]


def test_for_people_it_says_the_same(quick: Path) -> None:
    done = doctor(path=[quick])
    assert done.returncode == 1 and done.stderr == "" and "\x1b" not in done.stdout
    assert f"zeroelastic  {zeroelastic.__version__}  {Path(zeroelastic.__file__).parent}\n" in done.stdout
    assert re.search(r"^  FAIL  .*importing deepspeed failed: ImportError: a stand-in\.$", done.stdout, re.MULTILINE)
    assert "1 to fix:\n  - DeepSpeed: importing deepspeed failed" in done.stdout


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
    assert b"Versions" in shown and bool(re.search(rb"\x1b\[(1;)?3\dm", shown)) == coloured


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_without_libraries_it_says_why_not_and_how_to_build_them(quick: Path, tmp_path: Path) -> None:
    copy = package_copy(tmp_path)
    (copy / "zeroelastic/_native.log").write_text("there was no C++ compiler on the PATH\nmore\n")
    found = document(doctor("--json", path=[quick, copy]))
    assert found["package"] == str(copy / "zeroelastic") and found["executor"] == "numpy"
    native, cuda = found["engines"]["native"], found["engines"]["cuda"]
    assert native["state"] == cuda["state"] == "not built"
    assert native["reason"] == "there was no C++ compiler on the PATH" and cuda["reason"] == "it was not built"
    assert native["log"] == str(copy / "zeroelastic/_native.log") and cuda["log"] is None
    assert "ZEROELASTIC_BUILD_NATIVE=1 pip install" in native["remedy"]
    assert "zeroelastic doctor --build-cuda" in cuda["remedy"]
    assert [problem for problem in found["problems"] if "engine" in problem] == [], "an engine is not an obligation"
    shown = doctor(path=[quick, copy])
    assert "note  native" in shown.stdout and native["remedy"] in shown.stdout and native["log"] in shown.stdout
    assert shown.stderr == "", "what is a result is not also a warning"


NVCC = """\
#!/bin/sh
echo "$@" > "$0.arguments"
while [ "$1" != -o ]; do shift; done
cp "$LIBRARY" "$2"
"""


def installed_copy(folder: Path) -> Path:
    """The package as a wheel without the CUDA engine installs it: with the sources, and a list of its files."""
    copy = package_copy(folder)
    ignore = shutil.ignore_patterns("tests", "build", "Makefile")
    shutil.copytree(ROOT / "csrc", copy / "zeroelastic/csrc", ignore=ignore)
    info = copy / f"zeroelastic-{zeroelastic.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zeroelastic\nVersion: {zeroelastic.__version__}\n")
    (info / "RECORD").write_text(f"{info.name}/RECORD,,\n")
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
    cuda = document(done)["engines"]["cuda"]
    assert cuda["state"] == "usable" and cuda["path"] == str(copy / "zeroelastic/_cuda.so")
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
    for _ in range(2):  # what is built again is listed once
        record = copy / f"zeroelastic-{zeroelastic.__version__}.dist-info/RECORD"
        assert record.read_text().splitlines()[1:] == ["zeroelastic/_cuda.so,,", "zeroelastic/_cuda.log,,"]
        doctor("--build-cuda", path=[quick, copy], PATH=path, LIBRARY=str(BUILD.path))


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, "error: the CUDA engine is compiled by nvcc, which is not on the PATH. Install"),
        (
            {"nvcc": "#!/bin/sh\necho 'segments.cu(1): error: no such arch' >&2\nexit 2\n"},
            "failed with exit code 2: segments.cu(1): error: no such arch.",
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
    engine = found["engines"][name]
    assert engine["state"] == "broken" and str(library) in engine["reason"]
    assert REMEDIES[name] in engine["remedy"]
    problem = next(text for text in found["problems"] if f"the {name} engine" in text)
    assert engine["reason"].rstrip(".") in problem and engine["remedy"] in problem
    other = {"native": "cuda", "cuda": "native"}[name]
    assert found["engines"][other]["state"] == "not built", "one engine's crash hides nothing of the other"
    if damage is damage_truncated:
        assert "SIG" in engine["reason"]
        assert found["executor"] == (None if name == "native" else "numpy")


@built
def test_a_library_from_an_older_build_is_a_problem(quick: Path, tmp_path: Path) -> None:
    copy = package_copy(tmp_path)
    shutil.copy(BUILD.path, copy / "zeroelastic")
    info = copy / "zeroelastic/executors/build_info.py"
    text = re.sub(r"^ABI_VERSION = \d+", "ABI_VERSION = 99", info.read_text(), flags=re.MULTILINE)
    info.write_text(text)
    native = document(doctor("--json", path=[quick, copy]))["engines"]["native"]
    assert native["state"] == "broken" and "left from an older build" in native["reason"]


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
        assert found["deepspeed"]["state"] == "not installed" and found["deepspeed"]["seams"] == []
        assert "pip install 'zeroelastic[train]'" in found["deepspeed"]["remedy"]
        shown = doctor(path=[ROOT, site], python=["-S"])
        assert shown.returncode == 0 and "note               not installed: " in shown.stdout


def test_missing_requirements_are_problems_that_name_the_command(tmp_path: Path) -> None:
    with site_without(tmp_path / "site", "deepspeed", "numpy", "torch") as site:
        found = document(doctor("--json", path=[ROOT, site], python=["-S"]))
        assert found["versions"]["numpy"] is found["versions"]["torch"] is None
        (problem,) = (text for text in found["problems"] if "Install it: pip" in text)
        assert problem.startswith("numpy is not installed."), "torch is needed to train only"


@pytest.mark.parametrize("torch", ["torch>=2.6", "torch>=2.6; extra == 'train'"])
def test_a_requirement_that_is_too_old_is_a_problem(quick: Path, tmp_path: Path, torch: str) -> None:
    for name, text in {
        "zeroelastic-0.1.0": f"Name: zeroelastic\nRequires-Dist: {torch}\nRequires-Dist: none; extra == 'dev'\n",
        "torch-2.5.1": "Name: torch\nVersion: 2.5.1\n",
    }.items():
        (tmp_path / "old" / f"{name}.dist-info").mkdir(parents=True)
        (tmp_path / "old" / f"{name}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    found = document(doctor("--json", path=[quick, tmp_path / "old"]))
    assert found["versions"]["torch"] == "2.5.1"
    old = "torch 2.5.1 does not fit torch>=2.6. Upgrade it: pip install 'torch>=2.6'."
    assert [text for text in found["problems"] if "DeepSpeed" not in text] == [old], "the extra dev is not required"


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

NOISE = (
    "import os, sys; print('to stdout'); print('to stderr', file=sys.stderr); os.write(1, b'to the descriptor\\n')\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libcudart.so.12: cannot\\nbe opened')", "ImportError: libcudart.so.12: cannot be opened."),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'."),
        ("os.kill(os.getpid(), 11)", "the process was killed by SIGSEGV."),
        ("sys.stderr.write('gone\\n\\n'); os._exit(7)", "ended with exit code 7; its last line of output: gone."),
        ("sys.exit(0)", "ended with exit code 0; its last line of output: to "),
    ],
)
def test_a_deepspeed_that_cannot_be_imported_is_a_problem_and_its_noise_stays_out(
    tmp_path: Path, text: str, reason: str
) -> None:
    folder = write_package(tmp_path, {"deepspeed/__init__.py": NOISE + text})
    done = doctor("--json", path=[folder])
    found = document(done)
    assert found["deepspeed"]["state"] == "broken" and reason in found["deepspeed"]["reason"]
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
    assert found["deepspeed"]["state"] == "usable" and done.stderr == "to stderr\n"


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
    assert found["deepspeed"]["state"] == "broken"
    changed = [seam for seam in found["deepspeed"]["seams"] if seam["problem"]]
    assert [(seam["name"], seam["problem"]) for seam in changed] == [(name, problem)]
    assert (changed[0]["found"] is None) == (problem == "does not exist")
    # install() says the same: the two checks cannot drift apart unnoticed.
    assert f"{name} {problem}. Nothing was changed." in found["deepspeed"]["reason"]
    assert "Use a tested version" in found["problems"][-1]
    shown = doctor(path=[folder]).stdout
    assert re.search(rf"^  FAIL  (wrapped|called ) +{re.escape(name)} {problem}$", shown, re.MULTILINE)
    assert len(re.findall(r"^  .{4}  (?:wrapped|called) ", shown, re.MULTILINE)) == 1, "the others have no problem"


@pytest.mark.extended
@pytest.mark.parametrize("verbose", [False, True])
def test_methods_that_are_as_expected_are_named_with_verbose_only(verbose: bool) -> None:
    from zeroelastic.deepspeed.install.seams import SEAMS, USED

    shown = doctor(*(["--verbose"] if verbose else [])).stdout
    line = f"zeroelastic.install() works; its methods are as expected ({len(SEAMS)} wrapped, {len(USED)} called)\n"
    named = re.findall(r"^  ok    (?:wrapped|called) +(\S+)$", shown, re.MULTILINE)
    assert line in shown and len(named) == (len(SEAMS) + len(USED) if verbose else 0)


def test_a_module_that_moved_is_a_problem(tmp_path: Path) -> None:
    folder = fake_deepspeed(tmp_path)
    (folder / "deepspeed/runtime/zero/stage3.py").unlink()
    found = document(doctor("--json", path=[folder]))
    assert found["deepspeed"]["state"] == "broken"
    problems = {seam["name"]: seam["problem"] for seam in found["deepspeed"]["seams"]}
    gone = "does not exist (there is no deepspeed.runtime.zero.stage3)"
    assert problems["DeepSpeedZeroOptimizer_Stage3.state_dict"] == gone
    assert f"DeepSpeedZeroOptimizer_Stage3.state_dict {gone}" in found["deepspeed"]["reason"]
    assert problems["DeepSpeedEngine.load_checkpoint"] == ""


def test_a_deepspeed_that_is_too_old_is_a_problem(tmp_path: Path) -> None:
    folder = fake_deepspeed(tmp_path)
    (folder / "deepspeed-0.16.9.dist-info").mkdir()
    (folder / "deepspeed-0.16.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.9\n"
    )
    found = document(doctor("--json", path=[folder]))
    assert found["deepspeed"]["version"] == "0.16.9"
    assert "0.16.9 is too old" in found["deepspeed"]["reason"]


def test_what_lies_in_the_current_directory_is_not_brought_in(quick: Path, tmp_path: Path) -> None:
    """The console script does not have the current directory on its path, so its probes must not either."""
    here = write_package(
        tmp_path / "here", {"numpy/__init__.py": "raise RuntimeError('from here')", "json.py": "1 / 0"}
    )
    code = "import sys; del sys.path[0]"
    found = document(doctor("--json", path=[quick], code=code, cwd=here))
    assert found["executor"] is not None and not any("engine" in problem for problem in found["problems"])


def test_a_question_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(
        tmp_path,
        {"hanging.py": "import os, time\ndef hang(pid): open(pid, 'w').write(str(os.getpid())); time.sleep(600)"},
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Probe("hanging:hang", str(tmp_path / "pid")) as probe:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        with pytest.raises(ProbeFailed, match="it did not end within 0 s"):
            probe.answer(str, limit_s=0.1)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_ctrl_c_while_deepspeed_is_imported_ends_that_too(tmp_path: Path) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    folder = write_package(tmp_path, {"deepspeed/__init__.py": text})
    with started("pass", path=folder) as process:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "") and "Traceback" not in stderr
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@contextmanager
def started(code: str, *arguments: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Doctor in the background, with the handler of Ctrl-C that a shell's job control would leave it."""
    code = (
        f"{code}\nimport signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from zeroelastic.cli.app import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", *arguments],
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


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
