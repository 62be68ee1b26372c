"""Misuse of every verb and function: the error names the place and says what to do, and the exit code is documented."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from misuse_cases import OTHERS, Misuse, cases, errors_made, literal_text, says_what_to_do
from places import ROOT
from programs import no_result, run_command, wait_for
from sample import write_sample
from stock_programs import make_universal

import zeroelastic
from zeroelastic.cli.app import FAILED, INVALID, MISUSE, VERBS
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.elastic import ElasticDistributedSampler, batch_plan, every
from zeroelastic.errors import ZeroElasticError


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the cases name in braces."""
    root = tmp_path_factory.mktemp("misuse")
    write_sample(root / "ckpt")
    write_sample(root / "stray")
    (root / "stray/latest").unlink()
    make_universal(root / "ckpt/global_step4", root / "universal")
    (root / "empty").mkdir()
    (root / "file").write_text("x\n")
    (root / "file.svg").write_text("x")
    return {name: root / name for name in ("ckpt", "empty", "file", "stray", "universal", "new")}


def filled(text: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def test_every_verb_is_misused() -> None:
    assert set(OTHERS) == set(VERBS) and {case.verb for case in cases()} >= set(VERBS)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_an_error_names_the_place_and_says_what_to_do(case: Misuse, places: dict[str, Path]) -> None:
    before = sorted(places["empty"].parent.rglob("*"))
    arguments = [filled(word, places) for word in case.arguments]
    done = run_command(case.verb, *arguments, env={"COLUMNS": "300"})
    is_other_kind = "{universal}" in case.arguments and "--from" not in case.arguments
    assert done.returncode == (FAILED if is_other_kind else MISUSE), done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert filled(case.names, places) in error, error
    assert says_what_to_do(done.stderr) and "Input should" not in error and "─" not in done.stderr, error
    assert no_result(done.stdout) and sorted(places["empty"].parent.rglob("*")) == before


Call = Callable[[dict[str, Path]], Any]

FUNCTIONS: dict[str, tuple[Call, str]] = {  # beside what the verbs above hand to them
    "open": (lambda p: zeroelastic.open(p["new"]), "new"),
    "open, closed": (lambda p: _closed(p)["model.norm.weight"].numpy(), "closed"),
    "open, unknown": (lambda p: zeroelastic.open(p["ckpt"])["model.nrm.weight"], "model.nrm.weight"),
    "open, a step": (lambda p: zeroelastic.open(p["ckpt"])["model.norm.weight"][::2], "a step of 2"),
    "open, a buffer": (lambda p: zeroelastic.open(p["ckpt"]).optimizer("model.rotary.inv_freq"), "inv_freq"),
    "verify": (lambda p: zeroelastic.verify("memory://x/y"), "memory://x/y"),
    "plan": (lambda p: zeroelastic.plan(p["ckpt"], world_size=0), "0"),
    "reshard, a format": (
        lambda p: zeroelastic.reshard(p["ckpt"], p["new"], world_size=2, format="old"),  # type: ignore[arg-type]
        "--format: there is no 'old'",
    ),
    "reshard, text for a number": (
        lambda p: zeroelastic.reshard(p["ckpt"], p["new"], world_size="2"),  # type: ignore[arg-type]
        "--world-size: '2' is not a whole number",
    ),
    "plan, a fraction": (lambda p: zeroelastic.plan(p["ckpt"], world_size=2.5), "2.5 is not a whole number"),  # type: ignore[arg-type]
    "export, a dtype": (
        lambda p: zeroelastic.export(p["ckpt"], p["new"], dtype="float16"),  # type: ignore[arg-type]
        "--dtype: there is no 'float16'. Give one of fp32",
    ),
    "export, a choice": (
        lambda p: zeroelastic.export(p["ckpt"], p["new"], tied="none"),  # type: ignore[arg-type]
        "--tied: there is no 'none'. Give one of once, all",
    ),
    "convert, to a format": (
        lambda p: zeroelastic.convert(p["ckpt"], p["new"], to="onnx"),  # type: ignore[arg-type]
        "--to: there is no 'onnx'. Give one of fsdp2",
    ),
    "convert, from a format": (
        lambda p: zeroelastic.convert(p["ckpt"], p["new"], from_="dcp", world_size=2),  # type: ignore[arg-type]
        "--from: there is no 'dcp'",
    ),
    "convert, a layout": (
        lambda p: zeroelastic.convert(p["ckpt"], p["new"], to="fsdp2", layout="two"),  # type: ignore[arg-type]
        "--layout: there is no 'two'",
    ),
    "verify, a tag": (lambda p: zeroelastic.verify(p["ckpt"], tag=4), "has no tag 4. There are: global_step2"),  # type: ignore[arg-type]
    "prune, text for a number": (lambda p: zeroelastic.prune(p["ckpt"], keep="1"), "'1' is not a whole number"),  # type: ignore[arg-type]
    "batch_plan": (lambda p: batch_plan(10, 3), "10"),
    "batch_plan, no number": (lambda p: batch_plan(0, 3), "global_batch is 0"),
    "batch_plan, misfit": (lambda p: batch_plan(10, 3, misfit="x"), "'x'"),  # type: ignore[arg-type]
    "every": (lambda p: every(steps=0), "steps is 0"),
    "sampler": (lambda p: ElasticDistributedSampler(range(3), 5, drop_last=True), "3 samples"),
    "options, a list": (lambda p: parse_options({"zeroelastic": [1]}), "zeroelastic"),
    "options, unknown": (lambda p: parse_options({"zeroelastic": {"kep": 3}}), "'kep'"),
    "options, misspelt block": (lambda p: parse_options({"zero_elastic": {}}), "zero_elastic"),
    "options, misplaced": (lambda p: parse_options({"keep": 3}), "keep"),
    "options, keep": (lambda p: parse_options({"zeroelastic": {"keep": 0}}), "keep is 0"),
}


def test_an_option_without_its_value_names_the_help_of_the_verb() -> None:
    assert run_command("inspect", "x", "--params").stderr.endswith("Try 'zeroelastic inspect --help'.\n")


def _closed(places: dict[str, Path]) -> Any:
    with zeroelastic.open(places["ckpt"]) as ck:
        return ck


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_of_a_function_does_so_too(name: str, places: dict[str, Path]) -> None:
    call, names = FUNCTIONS[name]
    with pytest.raises(ZeroElasticError) as caught:
        call(places)
    assert names in str(caught.value) and says_what_to_do(str(caught.value)), caught.value


WORDS = {"UsageError", "ConfigError", "StrictError", "UnknownTensorError", "MissingPackageError"}
BY_OTHERS = {
    "not_a_directory", "_unfinished", "_what_is_there", "_choose", "_EXISTS", "_working_sizes", "error", "info",
    "there", "place", "message", "instead", "hint",
}  # fmt: skip
"""Functions and variables that make the end of a message, of which the matrix above has a case each."""


def test_every_message_of_misuse_in_the_package_says_what_to_do() -> None:
    """The literal text of each error, also of those that no case above reaches."""
    found = [(place, error.args[0]) for place, error in errors_made(WORDS)]
    silent = [
        f"{place}: {ast.unparse(message)}"
        for place, message in found
        if not says_what_to_do(literal_text(message))
        and BY_OTHERS.isdisjoint(n.id for n in ast.walk(message) if isinstance(n, ast.Name))
    ]
    assert not silent, "\n".join(silent)
    assert len(found) > 100


def test_the_judge_of_messages_can_say_no() -> None:
    assert not says_what_to_do("/ckpt/global_step4: is damaged.") and not says_what_to_do("the ranks disagree")
    assert says_what_to_do("/ckpt: exists. Give another --out, or remove it.")


# Exit codes


def documented() -> dict[int, str]:
    table = (ROOT / "docs/reference/cli.md").read_text().split("| exit code | meaning |")[1].split("\n\n")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, flags=re.MULTILINE)}


def test_the_table_of_exit_codes_is_that_of_the_code(places: dict[str, Path], tmp_path: Path) -> None:
    assert set(documented()) == {0, FAILED, MISUSE, INVALID, 128 + signal.SIGINT}
    assert run_command("verify", places["ckpt"]).returncode == 0
    assert run_command("diff", places["ckpt"] / "global_step2", places["ckpt"]).returncode == FAILED
    assert run_command("verify", places["new"]).returncode == MISUSE
    shutil.copytree(places["ckpt"], tmp_path / "ckpt")
    next((tmp_path / "ckpt/global_step4").glob("*rank_1_*optim_states.pt")).write_bytes(b"")
    assert run_command("verify", tmp_path / "ckpt").returncode == INVALID


WAITING_VERB = """
import sys
from zeroelastic.cli.app import main
from zeroelastic.verbs.inspect import inspect
inspect.find_source = lambda *args, **kwargs: open(sys.argv[-1]).read()
main()
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_verb_with_the_documented_code(tmp_path: Path, number: signal.Signals) -> None:
    """While it waits for a file system, here for a named pipe."""
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", WAITING_VERB, "inspect", str(tmp_path / "pipe")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            descriptor = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns when the verb has opened it
            wait_for(lambda: Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
            running.send_signal(number)
            assert running.wait(timeout=60) == 128 + number
        finally:
            running.kill()
            os.close(descriptor)
    assert str(128 + number) in str(documented())
