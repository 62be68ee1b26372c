"""The saved global batch and world sizes that do not divide it: said before a run stops at its start."""

from __future__ import annotations

import json
import re

from programs import run_command
from sample import write_sample

from zeroelastic.core.world_size import misfit_notes


def test_a_world_size_that_does_not_divide_the_saved_global_batch_is_noted(tmp_path):
    write_sample(tmp_path / "a", steps=[2])  # by 4 ranks, with a global batch of 24
    said = "the saved global batch of 24 cannot be shared evenly by 5 ranks"
    sizes = "World sizes that divide it: 1, 2, 3, 4, 6, 8, 12, 24."

    def run(*arguments: str) -> str:
        done = run_command(*arguments, env={"COLUMNS": "500"})
        assert done.returncode == 0
        return done.stdout

    src, dst = str(tmp_path / "a"), str(tmp_path / "b")
    for verb, heading in ((["plan", src], "Notes"), (["reshard", src, dst, "--dry-run"], "note: ")):
        text, document = run(*verb, "-n", "5"), json.loads(run(*verb, "-n", "5", "--json"))
        assert re.search(rf"{heading}\s*{re.escape(said)}", text) and sizes in text
        assert document["notes"][0].startswith(said) and document["notes"][0].endswith(sizes)
        assert said[:20] not in run(*verb, "-n", "6")
    assert said in json.loads(run("reshard", src, dst, "-n", "5", "--json"))["notes"][0]
    assert "24, for world sizes 1, 2, 3, 4, 6, 8, 12, 24" in run("inspect", src)


def test_sequence_parallel_groups_that_take_one_batch_are_no_misfit():
    assert misfit_notes(12, 8, 4, {}) and not misfit_notes(12, 6, 4, {}) and not misfit_notes(None, 8, 4, {})
    assert not misfit_notes(12, 8, 4, {"sequence_parallel_size": 2}) and not misfit_notes(6, 8, 12, {})
