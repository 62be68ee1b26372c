"""Parts of reports: values in templates, axes, bins, shades, and the data in a page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from zeroelastic.cli.pages.figures import Bins, byte_ticks, matrix, number_ticks
from zeroelastic.cli.pages.render import MOST_DATA, embedded, environment


def test_shades_are_proportional_to_bytes_and_nothing_is_no_shade() -> None:
    source, target = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0])
    nbytes = np.array([6_304_000, 6_312_000, 3_156_000, 0])
    chart = matrix(source, target, nbytes, num_sources=3, num_targets=2)
    page = ET.fromstring(environment().get_template("figures.html").module.figure("bytes", chart))
    cells = [node for node in page.iter("rect") if "data-tip" in node.attrib]
    shades = [float(node.get("fill-opacity", 0)) for node in cells]
    assert shades == pytest.approx([0.4994, 0.5, 0, 0.25, 0, 0], abs=1e-3)
    assert [node.attrib["data-tip"] for node in cells][1:3] == [
        "saved rank 0 to target rank 1: 6.0 MiB",
        "saved rank 1 to target rank 0: nothing",
    ]
    assert " ".join("".join(page.findall("p")[-1].itertext()).split()) == "0 6.0 MiB"


def test_data_is_cut_as_little_as_needed_and_stays_json() -> None:
    text, cut = embedded({"a": ["</script><!--&"] * 3, "b": {"c": [1]}})
    assert not cut and not set("<>&") & set(text) and json.loads(text)["a"][0] == "</script><!--&"
    rows = [{"name": "x" * 1000, "of": list(range(20))} for _ in range(10_000)]
    text, cut = embedded({"rows": rows, "few": [1, 2]})
    kept = json.loads(text)
    assert cut == {"rows": 10_000} and len(text) <= MOST_DATA and kept["few"] == [1, 2]
    assert len(kept["rows"]) == 1024 and kept["rows"][0] == rows[0], "2,048 of them would be too large"


def test_values_are_escaped_and_numbers_are_short() -> None:
    source = '<rect x="{{ a }}" y="{{ b }}" width="{{ c }}%" data-tip="{{ tip }}">{{ d }}{{ name|breakable }}</rect>'
    values = {"a": 0, "b": 0.0, "c": 1 / 3, "d": None, "tip": "a < \"b\" & 'c'\x1b", "name": "a.b/</c_d\u202e"}
    made = environment().from_string(source).render(values)
    assert made == (
        '<rect x="0" y="0" width="0.333%" data-tip="a &lt; &#34;b&#34; &amp; &#39;c&#39;\\x1b">'
        "a.<wbr />b/<wbr />&lt;/<wbr />c_<wbr />d\\u202e</rect>"
    )


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
