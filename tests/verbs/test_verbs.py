"""The verbs as functions: they report what ``--json`` prints, and take every option of the command."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from documents import DOCUMENTS
from programs import documented_keys, run_command
from pydantic import BaseModel, ValidationError

import zeroelastic
from zeroelastic.cli.app import verb_function

VERBS = ("convert", "diff", "export", "inspect", "latest", "ls", "plan", "prune", "reshard", "verify")
ONLY_THE_COMMAND = {"as_json", "all_tags", "path", "html", "force", "yes", "quiet"}
"""How a result is shown, a question, and ``--all`` of ``verify``, which is a function of its own."""

ONLY_THE_FUNCTION = {"progress"}
TIMES = {"seconds", "read_seconds"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_function_has_every_option_of_its_command(verb: str) -> None:
    command = inspect.signature(verb_function(verb))
    function = inspect.signature(getattr(zeroelastic, verb))
    options = {*command.parameters} - ONLY_THE_COMMAND
    assert options == set(function.parameters) - ONLY_THE_FUNCTION
    kinds = [parameter.kind for parameter in function.parameters.values()]
    positional = sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
    assert positional in (1, 2) and set(kinds[positional:]) <= {inspect.Parameter.KEYWORD_ONLY}
    for name, parameter in command.parameters.items():
        other = function.parameters.get(name)
        if other is not None and (verb, name) != ("prune", "dry_run"):
            assert other.default == parameter.default, name


def keys_of(kind: Any, key: str = "") -> set[str]:
    """The keys of a document, dotted, by the type of a report or of a part of one."""
    if get_origin(kind) in (tuple, list):
        return keys_of(get_args(kind)[0], f"{key}[]") if is_object(get_args(kind)[0]) else {key}
    if get_origin(kind) is dict:
        inside = keys_of(get_args(kind)[1], f"{key}.KEY")
        return inside if len(inside) > 1 else {key}
    if get_args(kind) and get_origin(kind) is not Literal:
        return set[str]().union(*(keys_of(one, key) for one in get_args(kind) if one is not type(None)))
    if is_dataclass(kind):
        return {f"{key}.{field.name}" for field in fields(kind)}
    if not is_object(kind):
        return {key}
    shown = [(name, field) for name, field in kind.model_fields.items() if not field.exclude]
    named = {field.serialization_alias or field.alias or name: field for name, field in shown}
    return set[str]().union(*(keys_of(one.annotation, f"{key}.{name}".lstrip(".")) for name, one in named.items()))


def is_object(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel))


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_of_the_report_is_documented_and_no_other(verb: str) -> None:
    """An object may be documented as a whole, and a name that varies as NAME, KEY or COLUMN."""
    table = {re.sub("NAME|COLUMN", "KEY", key) for key in documented_keys(verb)}
    variable = {key.partition(".KEY")[0] for key in table if ".KEY" in key}
    known = set()
    for key in keys_of(DOCUMENTS[verb]):
        parts = re.findall(r"[^.\[]+(?:\[\])?", key)
        if parts[0].removesuffix("[]") in variable and len(parts) > 1:
            parts[1] = f"KEY{'[]' if parts[1].endswith('[]') else ''}"
        whole = [".".join(parts[:length]).removesuffix("[]") for length in range(1, len(parts) + 1)]
        assert table.intersection(whole), key
        known.update(whole)
    assert table <= known


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def printed(*arguments: object) -> object:
    """The document that a command prints with --json, without times."""
    done = run_command(*arguments, "--json")
    assert done.returncode in (0, 1), done.output
    return without_times(json.loads(done.stdout))


@pytest.fixture
def run(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a checkpoint in ``ckpt``."""
    shutil.copytree(samples / "elastic", tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CASES = {
    "inspect": (
        ("ckpt",),
        {"params": "norm", "tensor": "model.norm.weight", "all_ranks": True},
        ["--params", "norm", "--tensor", "model.norm.weight", "--all-ranks"],
    ),
    "verify": (("ckpt",), {"tag": "global_step2"}, ["--tag", "global_step2"]),
    "plan": (("ckpt",), {"world_size": 3}, ["-n", 3]),
    "diff": (("ckpt/global_step2", "ckpt"), {"params": "*norm*"}, ["--params", "*norm*"]),
    "reshard": (("ckpt", "new"), {"world_size": 3}, ["-n", 3]),
    "export": (("ckpt", "new"), {"dtype": "bf16", "optimizer": True}, ["--dtype", "bf16", "--optimizer"]),
    "convert": (("ckpt", "new"), {"to": "fsdp2"}, ["--to", "fsdp2"]),
    "latest": (("ckpt",), {"quick": True}, ["--quick"]),
    "ls": (("ckpt",), {}, []),
    "prune": (("ckpt",), {"keep": 1}, ["--keep", 1, "--dry-run"]),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_the_report_is_the_document_of_the_command(run: Path, verb: str) -> None:
    paths, options, arguments = CASES[verb]
    report = getattr(zeroelastic, verb)(*paths, **options)
    shutil.rmtree(run / "new", ignore_errors=True)
    found = json.loads(json.dumps(report.to_json()))
    assert without_times(found) == printed(verb, *paths, *arguments)
    with pytest.raises(ValidationError):
        report.schema_version = 2


@pytest.mark.parametrize("verb", ["reshard", "export", "convert"])
def test_a_dry_run_writes_nothing_and_reports_the_document_of_the_command(run: Path, verb: str) -> None:
    paths, options, arguments = CASES[verb]
    report = getattr(zeroelastic, verb)(*paths, **options, dry_run=True)
    assert sorted(path.name for path in run.iterdir()) == ["ckpt"]
    assert without_times(json.loads(json.dumps(report.to_json()))) == printed(verb, *paths, *arguments, "--dry-run")


def test_prune_removes_nothing_unless_told_to(run: Path) -> None:
    planned = zeroelastic.prune("ckpt", keep=1)
    assert planned.dry_run and planned.removed == () and (run / "ckpt/global_step2").is_dir()
    done = zeroelastic.prune("ckpt", keep=1, dry_run=False)
    assert done.removed == ("global_step2",) and not (run / "ckpt/global_step2").exists() and done.freed_bytes > 0
    assert zeroelastic.prune("ckpt", keep=1, dry_run=False).removed == ()


def test_what_is_wrong_with_a_checkpoint_is_reported_and_not_raised(run: Path) -> None:
    (run / "ckpt/global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert zeroelastic.inspect("ckpt").problems and not zeroelastic.inspect("ckpt").ok
    assert not zeroelastic.verify("ckpt").valid and zeroelastic.verify("ckpt").problems
    assert zeroelastic.latest("ckpt").tag.name == "global_step2"


def test_numbers_may_be_those_of_numpy_and_tags_numbers(run: Path) -> None:
    report = zeroelastic.reshard("ckpt", "new", world_size=np.int64(2))
    assert report.target_world_size == 2
    (run / "ckpt/global_step4").rename(run / "ckpt/4")
    for tag in (4, Path("4")):
        assert zeroelastic.inspect("ckpt", tag=tag).tag == "4"
        with zeroelastic.open("ckpt", tag=tag) as ck:
            assert ck.tag == "4"


def test_the_last_report_of_an_engine_that_loaded_nothing_is_none() -> None:
    assert zeroelastic.last_report(object()) is None
