"""The command line as a whole: what it imports, where output goes, exit codes, completion, and its documentation."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from documents import DOCUMENTS
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN, ROOT
from programs import documented_keys, run_command, run_program, run_python

import zeroelastic
from zeroelastic.byte_sizes import format_size, parse_size
from zeroelastic.cli import app
from zeroelastic.verbs.interface import SCHEMA_VERSION


def verb_section(verb: str) -> str:
    """What the page of the command line says of a verb."""
    return (ROOT / "docs/reference/cli.md").read_text().split(f"\n## {verb}\n")[1].split("\n## ")[0]


VERBS = sorted(app.VERBS)


def cli(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "zeroelastic", *arguments, cwd=cwd, **env)


def test_help_is_quick_because_it_imports_nothing_large() -> None:
    """Each in a process of its own, forked behind the imports that all have."""
    code = (
        "import os, sys, atexit; from zeroelastic.cli.app import main\n"
        "heavy = lambda: {n.split('.')[0] for n in sys.modules} & {'torch', 'deepspeed', 'numpy'}\n"
        "for line in sys.stdin.read().splitlines():\n"
        "    if not os.fork():\n"
        "        sys.argv[1:] = line.split()\n"
        "        atexit.register(lambda: print('heavy:', sorted(heavy())))\n"
        "        sys.exit(main())\n"
        "    assert os.wait()[1] == 0, line"
    )
    commands = ["--help", "--version", *(f"{verb} --help" for verb in VERBS)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *shown, after_last = done.stdout.split("heavy: []\n")
    assert len(shown) == len(commands) and not after_last
    assert all(shown) and "heavy:" not in "".join(shown)


def test_version() -> None:
    assert cli("--version").stdout == f"zeroelastic {zeroelastic.__version__}\n"
    assert run_command("-V").stdout == f"zeroelastic {zeroelastic.__version__}\n"


@pytest.mark.parametrize("arguments", [[], *([verb] for verb in VERBS)], ids=" ".join)
def test_help_fits_into_80_columns_and_flags_take_no_value(arguments: list[str]) -> None:
    shown = run_command(*arguments, "-h", env={"COLUMNS": "80"}).stdout
    assert shown == run_command(*arguments, "--help", env={"COLUMNS": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80 and "-h, --help" in shown
    assert "bool" not in shown and "─" not in shown


def test_help_lists_every_verb_under_a_heading() -> None:
    shown = run_command("--help").stdout.partition("\nLook at a checkpoint:\n")[2]
    listed = re.findall(r"^  (\w+) +\S", shown, flags=re.MULTILINE)
    assert sorted(listed) == VERBS and len(re.findall(r"^\w.*:$", shown, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize("arguments", [["export"], ["convert", "--to", "fsdp2"]], ids=lambda words: words[0])
def test_a_place_that_cannot_be_written_is_named_as_it_was_given(arguments: list[str]) -> None:
    verb, *options = arguments
    done = run_command(verb, GOLDEN / "stage2_rank2", "/proc/out", *options)  # where nobody makes a directory
    assert (done.returncode, done.stderr) == (1, "error: /proc/out: No such file or directory\n")


def test_a_comparison_says_how_much_it_read_of_each_side() -> None:
    sides = GOLDEN / "elastic2", GOLDEN / "rigid3"
    nbytes = zeroelastic.diff(*sides).bytes_read // 2
    assert re.search(
        rf"^  read +{format_size(nbytes)} of each$", run_command("diff", *sides).stdout, flags=re.MULTILINE
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples_that_its_documentation_runs(verb: str) -> None:
    """tests/project/test_docs.py runs the bash blocks of the page."""
    shown = re.findall(rf"^ *(zeroelastic {verb}\b.*?) *$", run_command(verb, "--help").stdout, flags=re.MULTILINE)
    text = verb_section(verb)
    run = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```$", text, flags=re.DOTALL | re.M)
        for line in block.split("\n")
    ]
    assert shown and set(shown) <= set(run)


def test_every_verb_and_the_block_have_a_schema() -> None:
    assert {path.stem for path in (ROOT / "docs/schemas").iterdir()} == {*DOCUMENTS, "options"} >= {*VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_of_a_document_is_documented(verb: str) -> None:
    table = documented_keys(verb)
    fields = DOCUMENTS[verb].model_fields.items()
    keys = {field.serialization_alias or name for name, field in fields if not field.exclude}
    assert {re.split(r"[.\[]", key)[0] for key in table} == keys
    assert {"schema_version", "ok"} <= table


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["inspect", "no-such-directory"], 2, "no such directory"),
        (["plan", "."], 2, "Missing option '--world-size' / '-n'."),
        (["verify", ".", "--no-such-option"], 2, "No such option: --no-such-option"),
    ],
)
def test_a_failure_is_a_document_too(arguments: list[str], code: int, said: str) -> None:
    """``run_command`` holds it to the schema; the sentence is that on stderr."""
    done = run_command(*arguments, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == code and said in document["error"]
    assert document == {"schema_version": SCHEMA_VERSION, "ok": False, "error": document["error"]}
    assert done.stderr.startswith(f"error: {document['error']}\n")


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with the command `zeroelastic`, as pip writes it from [project.scripts]."""
    target = re.search(
        r'^\[project\.scripts\]\nzeroelastic = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert target is not None
    script = tmp_path / "bin" / "zeroelastic"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {target[1]} import {target[2]}\nsys.exit({target[2]}())\n")
    script.chmod(0o755)
    return script.parent


COMPLETED = {
    "doc": {"doctor"},
    "doctor --js": {"--json"},
    "inspect RUN --tag ''": {"global_step2", "global_step4"},
    "plan RUN -n 2 --tag global_step4": {"global_step4"},
    "latest RUN --set global_step2": {"global_step2"},
    "inspect s3://bucket/run --tag ''": set[str](),
}


def test_bash_completes_verbs_options_and_tags(command: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for folder in ("global_step2", "global_step4", "logs"):
        (run / folder).mkdir(parents=True)
        (run / folder / ("a.txt" if folder == "logs" else "zero_pp_rank_0_mp_rank_00_model_states.pt")).touch()
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{command}{os.pathsep}{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    script = 'set -e; eval "$(zeroelastic --show-completion bash)"; complete -p zeroelastic >/dev/null\n'
    for words in COMPLETED:
        script += f"COMP_WORDS=(zeroelastic {words.replace('RUN', str(run))}); COMP_CWORD={len(words.split())}\n"
        script += '_zeroelastic_completion zeroelastic; echo "${COMPREPLY[@]}"\n'
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    done = subprocess.run([bash, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [*COMPLETED.values()]


def test_the_console_script_is_the_same_command(command: Path) -> None:
    for arguments in (["--version"], ["doctor", "--help"]):
        done = run_program(command / "zeroelastic", *arguments, PYTHONPATH=str(ROOT))
        assert done.returncode == 0 and done.stdout == cli(*arguments).stdout


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7", 7),
        ("7B", 7),
        ("4k", 4096),
        ("256MiB", 256 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == parse_size(text.lower()) == parse_size(f" {text} ") == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e3", "1 XB", "1.M", "nan", "1MiBs"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_size_that_was_shown_reads_back_within_its_precision(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= 0.05 * nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1 << 20, "1 MiB"), (5 << 30, "5 GiB"),
     (1 << 40, "1 TiB"), (5000 << 40, "5000 TiB")],
)  # fmt: skip
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("unbuffered", "command"),
    [
        ("", "ls --help"),
        ("1", "ls {}"),
        ("", "plan -n 2 {}"),
        ("1", "verify --json {}"),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in (("", "--version"), ("1", "--version"), ("1", "ls --help"), ("", "ls {}"), ("", "ls --json {}"),
                         ("1", "ls --json {}"), ("1", "plan -n 2 {}"), ("", "verify --json {}"))
        ),
    ],
)  # fmt: skip
def test_where_the_output_cannot_be_written_there_is_one_sentence(unbuffered: str, command: str) -> None:
    words = [sys.executable, "-m", "zeroelastic", *command.format(GOLDEN / "rigid3").split()]
    run = partial(
        subprocess.run, stderr=subprocess.PIPE, timeout=60, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
    )
    with open("/dev/full", "w") as full:
        done = run(words, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")
    closed = run(["sh", "-c", f"{shlex.join(words)} >&-"])
    assert (closed.returncode, closed.stderr) == (0, b"")
    cut = run(["sh", "-c", f"{shlex.join(words)} | true"], stdout=subprocess.PIPE)
    assert (cut.returncode, cut.stderr) == (0, b""), "the exit code is that of the reader"


def test_names_that_the_encoding_of_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "rigid3", tmp_path / "\u6771\u4eac")
    words = [sys.executable, "-m", "zeroelastic", "inspect", str(tmp_path / "\u6771\u4eac")]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "\\u6771\\u4eac/global_step2" in done.stdout


RUNS = {
    "inspect": ["ckpt"],
    "verify": ["ckpt"],
    "plan": ["ckpt", "--world-size", "3"],
    "reshard": ["ckpt", "out", "-n", "3"],
    "diff": ["ckpt", "ckpt"],
    "export": ["ckpt", "out"],
    "convert": ["ckpt", "out", "--to", "fsdp2"],
    "ls": ["ckpt"],
    "latest": ["ckpt"],
    "prune": ["ckpt", "--keep", "1"],
    "doctor": ["--help"],
}
"""A run of each verb; those that need more than a checkpoint show their help."""


def test_every_verb_is_run() -> None:
    assert set(VERBS) == set(RUNS)


@pytest.mark.parametrize(
    "verb", [verb if verb == "inspect" else pytest.param(verb, marks=pytest.mark.extended) for verb in RUNS]
)
def test_a_verb_is_a_program(tmp_path: Path, verb: str) -> None:
    """Other tests run the verbs in their own process."""
    shutil.copytree(GOLDEN / "elastic2", tmp_path / "ckpt")
    done = cli(verb, *RUNS[verb], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout, done.stderr
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    within = run_command(verb, *RUNS[verb], cwd=tmp_path)
    assert within.returncode == 0
    if "--help" in RUNS[verb]:  # click's runner for tests wraps at another width
        assert within.stdout.split() == done.stdout.split()
    else:
        assert len(within.stdout.splitlines()) == len(done.stdout.splitlines())
