"""What has a digest of its own: for each state key, each strip that a rank has of a tensor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeroelastic.core.layout import Layout


class Stream(NamedTuple):
    """The elements of one strip of a tensor, for one state key; the strip begins at ``start`` of the whole tensor.

    A whole tensor is one strip, and begins at 0. Several ranks may have copies of one strip.
    """

    param: str
    key: str
    start: int = 0


def stream_of(layout: Layout, strip: int, key: str) -> Stream:
    """The stream of a strip of a layout, by its number; without slices, that of a parameter."""
    if layout.slices is None:
        return Stream(layout.params[strip].name, key)
    strips = layout.slices.strips
    return Stream(layout.params[int(strips.param[strip])].name, key, int(strips.start[strip]))


def streams_of(layout: Layout, sub_group: int, key: str) -> list[Stream]:
    """The streams of all parameters of a sub-group."""
    of = np.arange(layout.num_params) if layout.slices is None else layout.slices.strips.param
    return [stream_of(layout, strip, key) for strip in np.flatnonzero(layout.sub_group[of] == sub_group).tolist()]
