"""A load with zeroelastic installed is never worse than DeepSpeed's own at the same world size.

Stock DeepSpeed saves, or zeroelastic; both then load the same files into the same engine. Both return the same path and
client state, and every value is the one that stock left or, where stock loses something, the one that was saved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from extended import with_swept
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state

WORLD_SIZE = 2
STOCK = Job(elastic=False, installed=False)

Changes = dict[str, tuple[Callable[[Path], None], dict[str, dict[str, Any]]]]

OURS = {"elastic": Job(), "rigid": Job(elastic=False), "stage 2": Job(stage=2)}
"""How zeroelastic saves."""


FLAGS: dict[str, dict[str, bool]] = {
    "all": {},
    "no optimizer states": {"load_optimizer_states": False},
    "no scheduler": {"load_lr_scheduler_states": False},
    "module only": {"load_module_only": True},
    "not strict": {"load_module_strict": False},
}


@dataclass(frozen=True)
class Loaded:
    """What a load came to: ``error`` is the type and text of what it raised; ``path`` is relative to the directory."""

    path: str | None
    client_state: Any
    state: dict[str, Any]
    error: str = ""


def load(job: Job, directory: str, **options: Any) -> Loaded:
    """Load into a new engine whose every value differs from the saved one."""
    engine = build_engine(replace(job, lr=job.lr * 7, perturb=0.5))
    try:
        path, client_state = engine.load_checkpoint(directory, **options)
    except Exception as error:
        return Loaded(None, None, {}, f"{type(error).__name__}: {error}")
    state = fingerprint(gather_state(engine))
    theirs = {key: value for key, value in (client_state or {}).items() if key in ("note", "epoch", "global_steps")}
    return Loaded(None if path is None else os.path.relpath(path, directory), theirs, state)


def save(job: Job, directory: str, *, before: Callable[[Any], None] | None = None, **save: Any) -> dict[str, Any]:
    """Train and save, with DeepSpeed alone or with zeroelastic, which the job says; returns the saved state."""
    engine = build_engine(job)
    for step in range(2):
        train_step(engine, step)
    if before is not None:
        before(engine)
    state = fingerprint(gather_state(engine))
    engine.save_checkpoint(directory, **{"client_state": {"note": "hello"}, **save})
    if job.installed:
        zeroelastic.uninstall()
    return state


def both_ways(
    job: Job,
    directory: str,
    *,
    flags: dict[str, dict[str, Any]],
    before: Callable[[Any], None] | None = None,
    **options: Any,
) -> list[str]:
    """On a rank: save, load by both with each of the flags; what is worse with zeroelastic, in words."""
    saved = save(job, directory, before=before, **options)
    return load_both_ways(job, directory, saved, flags)


def changed_both_ways(job: Job, directory: str, changes: Changes) -> list[str]:
    """On a rank: ``both_ways`` of one save, after each of the changes."""
    saved, found = save(job, f"{directory}/saved"), []
    for name, (change, flags) in changes.items():
        if dist.get_rank() == 0:
            shutil.copytree(f"{directory}/saved", f"{directory}/{name}/run")
            change(Path(directory, name, "run"))
        dist.barrier()
        found += [f"{name}, {what}" for what in load_both_ways(job, f"{directory}/{name}/run", saved, flags)]
    return found


def load_both_ways(job: Job, directory: str, saved: dict[str, Any], flags: dict[str, dict[str, Any]]) -> list[str]:
    found: list[str] = []
    job = replace(job, elastic=False, installed=False)
    for name, options in flags.items():
        theirs = load(job, directory, **options)
        zeroelastic.install()
        ours = load(replace(job, installed=True), directory, **options)
        zeroelastic.uninstall()
        state_too = options.get("load_optimizer_states", True) and not options.get("load_module_only")
        found += [f"{name}: {what}" for what in worse(saved, theirs, ours, state_too=state_too)]
    return found


def worse(saved: dict[str, Any], stock: Loaded, ours: Loaded, *, state_too: bool) -> list[str]:
    """What a load by zeroelastic lacks of DeepSpeed's own; ``state_too``: optimizer state was asked for."""
    if stock.error:
        return []
    if ours.error or (stock.path is not None and ours.path is None):
        return [f"stock loaded {stock.path}, zeroelastic did not: {ours.error or 'a fresh start'}"]
    if stock.path is None:
        return []
    found = [f"{what} {want!r}, got {got!r}" for what, want, got in (
        ("path", stock.path, ours.path), ("client state", stock.client_state, ours.client_state),
    ) if want != got]  # fmt: skip
    restored = ("weight/", "master/", "buffer/") + (
        ("state/", "scalar/", "group/", "loss_scaler/", "grad_scaler/") if state_too else ()
    )
    for line in compare_states(stock.state, ours.state):
        key = line.partition(": ")[0]
        as_saved = (key in ours.state, ours.state.get(key)) == (key in saved, saved.get(key))
        if not (as_saved and key.startswith(restored)):
            found.append(line)
    return found


def check(rank_pool: RankPool, job: Job, tmp_path: Path, **options: Any) -> None:
    for rank, found in enumerate(rank_pool.run(both_ways, WORLD_SIZE, job, str(tmp_path / "ckpt"), **options)):
        assert found == [], f"rank {rank}"


def test_what_stock_saved_loads_as_stock_loads_it(rank_pool: RankPool, tmp_path: Path) -> None:
    """Of each optimizer and precision test_configurations.py shows that the state is the saved one."""
    check(rank_pool, STOCK, tmp_path, flags=FLAGS)


@pytest.mark.parametrize("form", OURS)
def test_what_we_saved_loads_as_stock_loads_it(rank_pool: RankPool, tmp_path: Path, form: str) -> None:
    check(rank_pool, OURS[form], tmp_path, flags=FLAGS)


def write_latest(text: str, directory: Path) -> None:
    (directory / "latest").write_text(text)


def add_files(directory: Path) -> None:
    """What people and tools leave beside the files of ranks."""
    tag = directory / "global_step2"
    for name in ("notes.txt", "zero_pp_rank_0_mp_rank_00_model_states.pt.bak", "layer_00-model_states.pt.tmp"):
        (tag / name).write_text("x")
    (tag / "logs").mkdir()
    (directory / "eval").mkdir()


def link_tag(directory: Path) -> None:
    (directory / "best").symlink_to("global_step2")


def move_and_link_tag(directory: Path) -> None:
    shutil.move(directory / "global_step2", directory.parent / "elsewhere")
    (directory / "global_step2").symlink_to(directory.parent / "elsewhere")


def link_files(directory: Path) -> None:
    """The files themselves lie beside the tag."""
    store = directory / "store"
    store.mkdir()
    for path in list((directory / "global_step2").iterdir()):
        shutil.move(path, store / path.name)
        path.symlink_to(store / path.name)


def remove_optimizer_states(directory: Path) -> None:
    for path in (directory / "global_step2").glob("*optim_states.pt"):
        path.unlink()


def remove_record(directory: Path) -> None:
    (directory / "global_step2" / "zeroelastic.json").unlink(missing_ok=True)


def remove_latest(directory: Path) -> None:
    (directory / "latest").unlink()


def rename_tag(directory: Path) -> None:
    (directory / "global_step2").rename(directory / "best")


def forget_times(directory: Path) -> None:
    for path in (directory / "global_step2").iterdir():
        os.utime(path, (0, 0))


def add_ranks(directory: Path) -> None:
    """An older save by more ranks has left its files in the tag: theirs say another world size."""
    import torch

    tag = directory / "global_step2"
    for path in list(tag.glob("*_rank_1_*")):
        state = torch.load(path, weights_only=False)
        if "dp_world_size" in state:
            state["dp_world_size"] = 3
        else:
            state["optimizer_state_dict"]["partition_count"] = 3
        torch.save(state, path.with_name(path.name.replace("_rank_1_", "_rank_2_")))


def no_gradients(engine: Any) -> None:
    for name, param in engine.module.named_parameters():
        if name.startswith("up."):
            param.requires_grad_(False)


DEFAULT: dict[str, dict[str, Any]] = {"all": {}}
CHANGES: Changes = {
    "latest with a newline": (partial(write_latest, "global_step2\n"), DEFAULT),
    "latest with blanks": (partial(write_latest, "  global_step2 \r\n"), DEFAULT),
    "latest names a tag that is not there": (partial(write_latest, "global_step9"), DEFAULT),
    "latest is empty": (partial(write_latest, ""), DEFAULT),
    "latest as a path": (partial(write_latest, "./global_step2"), DEFAULT),
    "extra files": (add_files, DEFAULT),
    "files of more ranks": (add_ranks, {**DEFAULT, "tag": {"tag": "global_step2"}}),
    "linked tag": (link_tag, {"tag": {"tag": "best"}}),
    "tag moved and linked": (move_and_link_tag, DEFAULT),
    "linked files": (link_files, DEFAULT),
    # the weights are in them, too
    "no optimizer files": (remove_optimizer_states, {name: FLAGS[name] for name in ("all", "no optimizer states")}),
}
"""What becomes of the files after a save, and the flags to load them with."""
REMOVALS: Changes = {
    # without the flags DeepSpeed goes on with an optimizer that begins anew, and zeroelastic refuses
    "no optimizer files": (
        remove_optimizer_states,
        {name: FLAGS[name] for name in ("no optimizer states", "module only")},
    ),
    "no record": (remove_record, FLAGS),
    "no latest": (remove_latest, {**DEFAULT, "tag": {"tag": "global_step2"}}),
    "another name": (rename_tag, {"tag": {"tag": "best"}}),
    "no times": (forget_times, DEFAULT),
}
"""What people remove, and copy without, of tags that zeroelastic saved."""
ODD: dict[str, dict[str, Any]] = {
    "nested tag": {"tag": "epoch1/step5"},
    "tag with a leading dot": {"tag": ".best"},
    "tag with a blank, in another alphabet": {"tag": "шаг\u00a0 5"},
    "client state named as a counter": {"client_state": {"global_steps": 7, "note": "mine"}},
    "requires_grad changed after initialize": {"before": no_gradients, "flags": FLAGS},
    "excluded frozen parameters": {
        "exclude_frozen_parameters": True,
        "flags": {
            "not strict": {"load_module_strict": False},
            "no optimizer states": {"load_module_strict": False, "load_optimizer_states": False},
            "strict, no optimizer states": {"load_optimizer_states": False},
            "strict": {},
        },
    },
    "no latest": {"save_latest": False, "flags": {**DEFAULT, "tag": {"tag": "global_step2"}}},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_checkpoints_load_where_stock_loads_them(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    check(rank_pool, STOCK, tmp_path, **{"flags": DEFAULT, **ODD[name]})


@pytest.mark.parametrize("form", OURS)
@pytest.mark.parametrize("name", with_swept(ODD, {*ODD} - {"client state named as a counter"}))
def test_odd_checkpoints_of_ours_load_where_stock_loads_them(
    rank_pool: RankPool, tmp_path: Path, name: str, form: str
) -> None:
    check(rank_pool, OURS[form], tmp_path, **{"flags": DEFAULT, **ODD[name]})


def check_changed(rank_pool: RankPool, tmp_path: Path, job: Job, changes: Changes) -> None:
    found = rank_pool.run(changed_both_ways, WORLD_SIZE, job, str(tmp_path), changes, timeout=600)
    for rank, worse_there in enumerate(found):
        assert worse_there == [], f"rank {rank}"


def test_changed_files_load_where_stock_loads_them(rank_pool: RankPool, tmp_path: Path) -> None:
    check_changed(rank_pool, tmp_path, STOCK, CHANGES)


@pytest.mark.parametrize("form", ["elastic", "rigid", pytest.param("stage 2", marks=pytest.mark.quick)])
def test_what_is_left_of_our_files_loads_where_stock_loads_it(rank_pool: RankPool, tmp_path: Path, form: str) -> None:
    changes = {**REMOVALS}
    if form == "elastic":  # not committed without it
        del changes["no record"]
    if OURS[form].stage == 3:  # no other files have trained weights: DeepSpeed goes on with those of the run
        change, flags = changes["no optimizer files"]
        changes["no optimizer files"] = (change, {"no optimizer states": flags["no optimizer states"]})
    check_changed(rank_pool, tmp_path, OURS[form], changes)
