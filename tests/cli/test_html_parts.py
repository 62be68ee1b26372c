"""What reports are made of: elements, axes, bins, shades, and the data in a page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from zeroelastic.cli.html.embed import LARGEST, embedded
from zeroelastic.cli.html.figures.matrix import draw_matrix
from zeroelastic.cli.html.figures.scale import Bins, byte_ticks, number_ticks
from zeroelastic.cli.html.markup import element, render


def test_shades_are_proportional_to_bytes_and_nothing_is_no_shade() -> None:
    source, target = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0])
    nbytes = np.array([6_304_000, 6_312_000, 3_156_000, 0])
    figure = draw_matrix("bytes", source, target, nbytes, num_sources=3, num_targets=2)
    cells = [node for node in ET.fromstring(render(figure.drawing)).iter("rect")]
    shades = [float(node.get("fill-opacity", 0)) for node in cells]
    assert shades == pytest.approx([0.4994, 0.5, 0, 0.25, 0, 0], abs=1e-3)
    assert [node.attrib["data-tip"] for node in cells][1:3] == [
        "saved rank 0 to target rank 1: 6.0 MiB",
        "saved rank 1 to target rank 0: nothing",
    ]
    assert " ".join("".join(ET.fromstring(render(figure.legend)).itertext()).split()) == "0 6.0 MiB"


def test_data_is_cut_as_little_as_needed_and_stays_json() -> None:
    text, cut = embedded({"a": ["</script><!--&"] * 3, "b": {"c": [1]}})
    assert not cut and not set("<>&") & set(text) and json.loads(text)["a"][0] == "</script><!--&"
    rows = [{"name": "x" * 1000, "of": list(range(20))} for _ in range(10_000)]
    text, cut = embedded({"rows": rows, "few": [1, 2]})
    kept = json.loads(text)
    assert cut == {"rows": 10_000} and len(text) <= LARGEST and kept["few"] == [1, 2]
    assert len(kept["rows"]) == 1024 and kept["rows"][0] == rows[0], "2,048 of them would be too large"


def test_attributes_are_written_as_they_are_meant() -> None:
    made = element("rect", class_="a", aria_hidden="true", x=0, y=0.0, width=1.25, hidden=True, open=False, title=None)
    assert render(made) == '<rect class="a" aria-hidden="true" x="0" y="0" width="1.25" hidden=""></rect>'
    assert render(element("p", 'a < b & "c"', element("wbr"))) == "<p>a &lt; b &amp; &quot;c&quot;<wbr /></p>"


@pytest.mark.parametrize("count", [1, 5, 48, 49, 1000, 4096])
def test_bins_cover_everything_once(count: int) -> None:
    bins = Bins.at_most(count, 48)
    assert bins.num <= 48 and (bins.num - 1) * bins.step < count <= bins.num * bins.step


def test_axes_have_round_numbers_within_them() -> None:
    assert [tick.text for tick in number_ticks(9.8)] == ["0", "2", "4", "6", "8"]
    assert [tick.text for tick in number_ticks(1)] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [tick.text for tick in byte_ticks(5 << 20)] == ["0", "2 MiB", "4 MiB"]
    assert [tick.text for tick in number_ticks(0)] == ["0"]
    assert all(0 <= tick.at <= 1 for most in (3e-7, 0.7, 9, 1e9) for tick in number_ticks(most))
