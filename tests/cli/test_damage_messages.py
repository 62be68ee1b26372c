"""Damaged files: every error and report names the file and what is wrong with it, and says once what to do."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from misuse_cases import errors_made, literal_text, says_what_to_do
from places import ROOT
from programs import run_command
from sample import write_sample
from saved_files import flip as flip_bit

import zeroelastic
from zeroelastic import errors
from zeroelastic.cli import runs
from zeroelastic.cli.app import INVALID
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    UnreadableError,
    ZeroElasticError,
    advice,
    finding,
    with_remedy,
)
from zeroelastic.io import remote

OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_2_mp_rank_00_model_states.pt"
RECORD = "zeroelastic.json"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("damage")
    write_sample(directory / "ckpt")
    return directory / "ckpt"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """A bit of a weight."""
    with zeroelastic.open(path.parent) as checkpoint:
        (offset,) = (place.offset for place in checkpoint.places("model.norm.weight") if place.file == path.name)
    flip_bit(path, offset)


def older(path: Path) -> None:
    """The file of another save."""
    shutil.copy(path.parent.with_name("global_step2") / path.name, path)


def no_json(path: Path) -> None:
    path.write_text("{")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "an optimizer file is missing": (Path.unlink, OPTIMIZER),
    "a model file is missing": (Path.unlink, MODEL),
    "an optimizer file is cut": (cut, OPTIMIZER),
    "a model file is cut": (cut, MODEL),
    "an optimizer file is empty": (lambda path: path.write_bytes(b"") and None, OPTIMIZER),
    "an optimizer file is of another save": (older, OPTIMIZER),
    "a bit is flipped": (flip, OPTIMIZER),
    "the record is no JSON": (no_json, RECORD),
    "latest is no text": (lambda path: path.write_bytes(b"\xff\xfe") and None, "../latest"),
    "latest names nothing": (lambda path: path.write_text("global_step9") and None, "../latest"),
}


@pytest.fixture(params=DAMAGE)
def damaged(request: pytest.FixtureRequest, sample: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A damaged checkpoint and the name of the file that is to be named."""
    shutil.copytree(sample, tmp_path / "ckpt")
    damage, name = DAMAGE[request.param]
    damage(tmp_path / "ckpt/global_step4" / name)
    yield tmp_path / "ckpt", Path(name).name


def remedies(text: str) -> int:
    """How often a text says how to go back to another checkpoint."""
    return " ".join(text.split()).count("--fix`")


def names(text: str, name: str) -> bool:
    """Whether a text names a file: a missing one without its prefix, which its neighbours tell."""
    return name.removeprefix("bf16_") in text


def test_a_verification_names_the_file_and_ends_with_what_to_do(damaged: tuple[Path, str]) -> None:
    directory, name = damaged
    done = run_command("verify", directory, env={"COLUMNS": "80"})
    assert done.returncode == INVALID
    assert names(done.stdout, name) and remedies(done.stdout) == 1
    assert says_what_to_do(done.stdout.split("Invalid:")[1])
    report = json.loads(run_command("verify", directory, "--json").stdout)
    assert says_what_to_do(report["remedy"]) and all(remedies(p["sentence"]) == 0 for p in report["problems"])


@pytest.mark.parametrize("verb", ["inspect", "plan", "reshard", "export"])
def test_a_verb_names_the_file_and_says_what_to_do_once(verb: str, damaged: tuple[Path, str], tmp_path: Path) -> None:
    directory, name = damaged
    call: dict[str, Callable[[], object]] = {
        "inspect": lambda: zeroelastic.inspect(directory),
        "plan": lambda: zeroelastic.plan(directory, world_size=3),
        "reshard": lambda: zeroelastic.reshard(directory, tmp_path / "out", world_size=3),
        "export": lambda: zeroelastic.export(directory, tmp_path / "out"),
    }
    if verb == "inspect":
        report = zeroelastic.inspect(directory)
        if report.ok:  # it reads the headers of one rank
            assert name in (OPTIMIZER, MODEL)
            return
        text = " ".join((*report.problems, report.remedy or ""))
    else:
        try:
            call[verb]()
        except CheckpointError as error:
            text = str(error)
        else:  # it does not read what is damaged
            assert verb == "plan" and name == OPTIMIZER
            return
    parameter = name == OPTIMIZER and "model.norm.weight" in text  # of a digest of all ranks
    assert (names(text, name) or parameter) and str(directory) in text, text
    assert remedies(text) == 1 and says_what_to_do(text), text
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_is_not_called_damaged(sample: Path, tmp_path: Path) -> None:
    error = UnreadableError(f"{tmp_path}: cannot be read: Permission denied.")
    assert "may be sound" in advice(error) and says_what_to_do(advice(error))


FAMILY = [CheckpointError, UnreadableError, *CheckpointError.__subclasses__(), *UnreadableError.__subclasses__()]
SAID_IN_EACH_MESSAGE = {"NewerFormatError", "OldFormatError", "SavedAgainError"}


@pytest.mark.parametrize("kind", [kind for kind in FAMILY if kind.__module__ == errors.__name__])
def test_every_class_of_damage_has_a_remedy(kind: type[ZeroElasticError]) -> None:
    assert says_what_to_do(kind.remedy) or kind.__name__ in SAID_IN_EACH_MESSAGE
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert f"\n| `{kind.__name__}` (" in page


def test_every_error_without_the_remedy_of_its_class_says_what_to_do() -> None:
    """Each error in the package of a class without a remedy, or with one of its own."""
    constants = {"_COPY": remote._COPY, "_COPY_ONE": runs._COPY_ONE}
    count, silent = 0, []
    for place, error in errors_made({kind.__name__ for kind in FAMILY}):
        own = [word.value for word in error.keywords if word.arg == "remedy"]
        if own or ast.unparse(error.func) in SAID_IN_EACH_MESSAGE:
            count += 1
            texts = [constants.get(ast.unparse(part)) or literal_text(part) for part in (error.args[0], *own)]
            if not any(map(says_what_to_do, texts)):
                silent.append(f"{place}: {texts}")
    assert not silent, "\n".join(silent)
    assert count > 20


def test_a_remedy_is_added_once_and_taken_off_again() -> None:
    error = MissingFileError("/ckpt/latest: is missing")
    with pytest.raises(MissingFileError) as caught, with_remedy(), with_remedy():
        raise error
    assert str(caught.value) == advice(error) == f"/ckpt/latest: is missing. {MissingFileError.remedy}"
    assert finding(error) == "/ckpt/latest: is missing."
    own = CheckpointError("/ckpt: is of another kind. Give its directory.", remedy="")
    assert advice(own) == finding(own) == str(own)
