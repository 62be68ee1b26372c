"""A tag that is saved again while it is read, as each kind of save and of removal leaves it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import write_checkpoint

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.tag_files import one_save, watch
from zeroelastic.errors import CheckpointError, SavedAgainError

OPTIM = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


def replace(tag: Path) -> None:
    shutil.move(tag, tag.with_name("aside"))
    shutil.copytree(tag.with_name("aside"), tag)


def rewrite(tag: Path) -> None:
    data = (tag / OPTIM).read_bytes()
    (tag / OPTIM).write_bytes(data)


CHANGES: dict[str, Callable[[Path], None]] = {
    "a save puts another directory in its place": replace,
    "its files are written again in place": rewrite,
    "one of its files is removed": lambda tag: (tag / OPTIM).unlink(),
    "it is removed": shutil.rmtree,
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_a_tag_is_read_is_an_error_that_says_so(tmp_path: Path, change: str, recorded: bool) -> None:
    tag = tmp_path / "tag"
    write_checkpoint(tag, world_size=2)
    if recorded:
        (tag / RECORD_NAME).touch()
    opened = watch(tag)
    with one_save(opened):
        pass
    seen = not recorded or change in ("a save puts another directory in its place", "it is removed")
    CHANGES[change](tag)
    if seen:  # what is written into a committed tag is found by its record: that stays what it was
        for error in (None, CheckpointError("torn"), OSError("gone")):
            with pytest.raises(SavedAgainError, match="was saved again, or removed"), one_save(opened):
                if error is not None:
                    raise error
    else:
        with one_save(opened):
            pass


def test_a_path_in_another_process_is_watched_since_it_was_first_looked_at(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2)
    opened = pickle.loads(pickle.dumps(watch(tmp_path / "tag")))
    with one_save(opened, tmp_path / "tag"):  # and a path that nobody watches is as it is
        pass
    rewrite(tmp_path / "tag")
    with pytest.raises(SavedAgainError), one_save(opened):
        pass


def test_an_error_of_a_tag_that_stays_as_it_is_is_raised_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tag", world_size=2)
    for tag in (tmp_path / "tag", tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="torn"), one_save(watch(tag)):
            raise CheckpointError("torn")


def test_a_tag_that_appears_while_it_is_looked_for_is_one_that_was_saved_meanwhile(tmp_path: Path) -> None:
    opened = watch(tmp_path / "tag")
    with pytest.raises(SavedAgainError), one_save(opened):
        write_checkpoint(tmp_path / "tag", world_size=2)
        raise CheckpointError("no such directory")
