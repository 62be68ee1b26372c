"""zeroelastic.core.copies: strips that are copies, and the strip of each run."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from sliced import layout_of, tensor_lists, topologies

from zeroelastic.core.copies import first_copies, strips_of_runs
from zeroelastic.core.layout import Param
from zeroelastic.core.plan import held_plan
from zeroelastic.core.slices import RankSet, Strip, slices_of


@given(tensors=tensor_lists, topology=topologies)
def test_runs_are_of_the_strips_that_have_their_elements(tensors, topology):
    layout = layout_of(tensors, topology)
    strips = layout.slices.strips
    elements = [
        {
            int(strips.start[s] + run * strips.stride[s] + i)
            for run in range(strips.num_runs[s])
            for i in range(strips.numel[s])
        }
        for s in range(len(strips))
    ]
    for rank in range(topology.world_size):
        plan = held_plan(layout, rank).run_by_run()
        found = strips_of_runs(layout.slices, plan.param, plan.start)
        for row, strip in enumerate(found.tolist()):
            start, length = int(plan.start[row]), int(plan.length[row])
            assert strips.param[strip] == plan.param[row]
            assert elements[strip] >= {*range(start, start + length)}
    first = first_copies(layout.slices)
    names = [layout.slices.tensors[p].name for p in strips.param.tolist()]
    for strip, other in enumerate(first.tolist()):
        same = [s for s in range(len(strips)) if (names[s], elements[s]) == (names[strip], elements[strip])]
        assert other == min(same)


def test_a_slice_of_several_gapped_strips():
    tensor = Param("qkv", (4, 12))
    strips = (Strip(0, 0, 2, 4, 12, 4), Strip(6, 2, 2, 4, 12, 4))
    slices = slices_of([tensor], [RankSet(0, 1, 1)], [strips])
    zero = np.zeros(8, dtype=np.int64)
    start = np.array([0, 6, 12, 18, 25, 31, 37, 43])
    assert strips_of_runs(slices, zero, start).tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
