"""``--html``: what a report says, that it is one file, and that names from files stay text. Without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Done, run_command
from report_documents import diff_document, inspect_document, plan_document, verify_document
from synthetic import optim_name, write_checkpoint

from zeroelastic.cli.pages import MOST_DATA, embedded, environment, report
from zeroelastic.cli.pages.checkpoints import layout_chart
from zeroelastic.cli.pages.figures import Bins, byte_ticks, matrix, number_ticks
from zeroelastic.cli.terminal import write_new_file
from zeroelastic.core.layout import Layout, Param, group_split_layout, layout_from_sub_groups, pack_sub_groups
from zeroelastic.errors import UsageError
from zeroelastic.io import atomic
from zeroelastic.testing.sample import write_sample
from zeroelastic.verbs.inspect.report import InspectedParam, SavedLayout

VERBS = ("inspect", "verify", "plan", "diff")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    write_sample(root / "ckpt", world_size=4)
    return root


def arguments(verb: str, samples: Path) -> list[str]:
    ckpt = str(samples / "ckpt")
    return {
        "inspect": ["inspect", ckpt],
        "verify": ["verify", ckpt],
        "plan": ["plan", ckpt, "-n", "3"],
        "diff": ["diff", f"{ckpt}/global_step2", ckpt],
    }[verb]


def document_of(verb: str, samples: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_command(*arguments(verb, samples), "--json").stdout)
    return found


def parsed(text: str) -> ET.Element:
    """The page, by a parser that takes nothing but well-formed XML."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text)


def words(node: ET.Element) -> str:
    return " ".join("".join(node.itertext()).split())


def by_class(page: ET.Element, name: str) -> list[ET.Element]:
    return [node for node in page.iter() if name in node.get("class", "").split()]


def tips(page: ET.Element, name: str) -> list[str]:
    """The texts of the marks of the drawing with this name."""
    (plot,) = [node for node in page.iter("svg") if node.get("aria-label") == name]
    return [node.attrib["data-tip"] for node in plot.iter() if "data-tip" in node.attrib]


@pytest.mark.support("Using it", "`--html`: reports of six verbs for a browser", "exact", "one file that loads nothing")
@pytest.mark.parametrize("verb", VERBS)
def test_a_report_is_one_file_with_the_document_in_it(verb: str, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = run_command(*arguments(verb, samples), "--html", out, "--json")
    assert done.returncode == (1 if verb == "diff" else 0), done.stderr
    text = out.read_text()
    page = parsed(text)
    (data,) = [node for node in page.iter("script") if node.get("type") == "application/json"]
    printed = json.loads(done.stdout)
    held = json.loads(words(data))
    assert held == printed
    for node in page.iter():
        assert not {"src", "href", "style", "action", "srcset", "xlink:href"} & set(node.attrib), node.attrib
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert page.find("body/main/p").get("id") == "summary", "the sentence comes first"
    assert page.find("head/title").text == f"{verb}: {words(page.find('body/header/h1'))}"


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_exists_is_replaced_only_by_force(verb: str, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("older")
    refused = run_command(*arguments(verb, samples), "--html", out, "--json")
    assert refused.returncode == 2 and "nothing is overwritten without --force" in refused.stderr
    assert out.read_text() == "older" and set(json.loads(refused.stdout)) == {"schema_version", "ok", "error"}
    done = run_command(*arguments(verb, samples), "--html", out, "--force")
    assert done.returncode in (0, 1) and f"Report: {out}\n" in done.stdout
    assert out.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report.txt", "is written as .html or .htm"),
        ("none/report.html", "there is no directory"),
        ("folder.html", "exists"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_the_work(name: str, said: str, samples: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    done = run_command("verify", samples / "ckpt", "--html", tmp_path / name, "--force")
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""


@pytest.mark.parametrize("can_rename", [True, False])
def test_of_all_that_write_at_once_one_does_and_nothing_is_left(
    can_rename: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system, such as NFS, that cannot rename a file without replacing another."""
    if not can_rename:
        monkeypatch.setattr(atomic, "rename_new", lambda src, dst: False)
    out, refused = tmp_path / "report.html", []

    def write(text: bytes) -> None:
        try:
            write_new_file(out, text)
        except UsageError:
            refused.append(text)

    texts = [bytes([65 + number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and out.read_bytes() in texts and out.read_bytes() not in refused
    assert list(tmp_path.iterdir()) == [out]


HOSTILE = "<script>alert(1)</script>\"'&amp;]]>--><img src=x onerror=alert(2)>\x1b[31m\u202e\n"


@pytest.mark.parametrize("verb", ["inspect", "verify", "plan", "diff"])
def test_names_from_a_checkpoint_are_text(verb: str, tmp_path: Path) -> None:
    """As a parameter's name, and as a directory's; a path cannot have a slash in a name, but everything else."""
    run = tmp_path / HOSTILE.replace("/", "\u2215")
    groups = [[Param(HOSTILE, (5, 4)), Param("</title><b>w", (7,))]]
    for step in (1, 2):
        write_checkpoint(
            run / f"global_step{step}", world_size=2, groups=groups, record=True, seed=step, global_steps=step
        )
    damaged = run / "global_step2" / optim_name(1)
    if verb == "verify":
        data = bytearray(damaged.read_bytes())
        at = data.index(b"data/0") + 200
        data[at] ^= 1
        damaged.write_bytes(data)
    first = {"diff": [run / "global_step1"]}.get(verb, [])
    options = ["-n", "3"] if verb == "plan" else []
    done = run_command(verb, *first, run / "global_step2", *options, "--html", tmp_path / "r.html")
    assert done.returncode == {"verify": 3, "diff": 1}.get(verb, 0), done.stdout + done.stderr
    page = parsed((tmp_path / "r.html").read_text())
    assert not [node for node in page.iter() if node.tag in ("b", "img")]
    assert [node.get("type") for node in page.iter("script")] == ["application/json", None]
    assert not [name for node in page.iter() for name in node.attrib if name.startswith("on")]
    shown = words(page.find("body/main")) + words(page.find("body/header"))
    assert "<img src=x onerror=alert(2)>" in shown and "\\x1b[31m\\u202e" in shown
    name = {"verify": "</title><b>w", "plan": "<script>alert(1)<"}.get(verb, "<script>alert(1)</script>\"'&amp;]]>-->")
    assert name in shown
    (data_script,) = [node for node in page.iter("script") if node.get("type") == "application/json"]
    assert json.loads(words(data_script))["schema_version"] == 1


def test_only_the_script_and_the_style_of_the_page_itself_may_run(samples: Path) -> None:
    page = parsed(report("inspect", document_of("inspect", samples)))
    (policy,) = [node.attrib["content"] for node in page.iter("meta") if node.get("http-equiv")]
    script = [node.text for node in page.iter("script")][-1]
    (style,) = [node.text for node in page.iter("style")]
    for kind, text in (("script", script), ("style", style)):
        inside = f"/*<![CDATA[*/{text.removeprefix('/**/').removesuffix('/**/')}/*]]>*/"
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def damage(ckpt: Path) -> tuple[Path, int]:
    """Turn a bit in the weights of rank 2; which file, and at which byte."""
    (path,) = ckpt.glob("*rank_2_*optim_states.pt")
    data = bytearray(path.read_bytes())
    largest = max(range(0, len(data) - 64, 64), key=lambda at: len(set(data[at : at + 64])))
    data[largest] ^= 1
    path.write_bytes(data)
    return path, largest


def test_damage_is_in_red_at_its_place_and_has_a_sign(samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples / "ckpt", tmp_path / "ckpt")
    path, place = damage(tmp_path / "ckpt/global_step4")
    next((tmp_path / "ckpt/global_step4").glob("zero_pp_rank_1_*model_states.pt")).unlink()
    done = run_command("verify", tmp_path / "ckpt", "--html", tmp_path / "r.html", "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    (problem,) = [one for one in found["problems"] if one["offset"] is not None]
    assert problem["file"] == path.name and problem["offset"] <= place < problem["offset"] + problem["bytes"]
    page = parsed((tmp_path / "r.html").read_text())
    (mark,) = [node for node in by_class(page, "damage") if "data-tip" in node.attrib]
    largest = max(file["bytes"] for file in found["files"])
    assert float(mark.attrib["x"][:-1]) == pytest.approx(100 * problem["offset"] / largest, abs=0.01)
    assert float(mark.attrib["width"][:-1]) == pytest.approx(max(100 * problem["bytes"] / largest, 0.4), abs=0.01)
    assert mark.attrib["data-tip"] == problem["sentence"]
    missing = [node.attrib["data-tip"] for node in by_class(page, "damage-all") if "data-tip" in node.attrib]
    assert len(missing) == 1 and "zero_pp_rank_1_mp_rank_00_model_states.pt: is missing" in missing[0]
    bad = [node.text for node in by_class(page, "label") if "bad" in node.attrib["class"]]
    assert bad == ["\N{MULTIPLICATION X} 1 model", "\N{MULTIPLICATION X} 2 optimizer"]
    assert len([node for node in by_class(page, "sign") if node.get("x", "").endswith("%")]) == 2
    assert problem["param"] is None or problem["param"] in words(page)
    sentence = words(page.find("body/main/p"))
    assert "Invalid: 2 problems" in sentence and path.name in sentence


def test_files_that_are_missing_are_shown_in_the_layout(samples: Path, tmp_path: Path) -> None:
    shutil.copytree(samples / "ckpt", tmp_path / "ckpt")
    next((tmp_path / "ckpt/global_step4").glob("*zero_pp_rank_2_*optim_states.pt")).unlink()
    assert run_command("inspect", tmp_path / "ckpt", "--html", tmp_path / "r.html").returncode == 3
    page = parsed((tmp_path / "r.html").read_text())
    bad = [node.text for node in by_class(page, "label") if "bad" in node.attrib["class"]]
    assert bad == ["\N{MULTIPLICATION X} rank 2"]
    assert "rank 2: its optimizer file is missing" in tips(page, LAYOUT)


LAYOUT = "The flat buffers of each rank, and the parameters in them"


def drawn_layout(layout: Layout, split: Any) -> ET.Element:
    params = [
        InspectedParam(
            name=param.name, kind="trained", shape=list(param.shape), numel=param.numel, bytes=0, group=0, dtypes={},
            tied_to=None, sub_group=int(layout.sub_group[i]), offset=int(layout.in_buffer[i]),
        )
        for i, param in enumerate(layout.params)
    ]  # fmt: skip
    saved = SavedLayout(split=split, sub_group_numel=layout.sub_group_numel.tolist())
    chart = layout_chart(saved, params, layout.world_size, missing=(), marked=())
    return ET.fromstring(environment().get_template("figures.html").module.figure("layout", chart))


GROUPS = [[Param("a", (5, 4)), Param("b", (7,)), Param("c", (1,))], [Param("d", (3, 3)), Param("e", (2,))]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("split", ["param", "group"])
def test_the_layout_is_the_one_of_the_plan(split: str, world_size: int) -> None:
    """Every parameter of every rank where its buffers have it: by core.layout, which a load goes by."""
    if split == "param":
        layout = layout_from_sub_groups(pack_sub_groups(GROUPS, world_size=world_size, sub_group_size=9), world_size)
    else:
        layout = group_split_layout(GROUPS, world_size, [[1, 0, 0], [2, 0]])
    page = drawn_layout(layout, split)
    end = int(layout.sub_group_numel.sum())
    bases = np.cumsum(layout.sub_group_numel) - layout.sub_group_numel
    want = set()
    for rank in range(world_size):
        owned, begin = layout.owned(rank)[1], layout.buffer_offset(rank)
        for i, param in enumerate(layout.params):
            if owned[i]:
                place = int(bases[layout.sub_group[i]] + begin[i])
                want.add((rank, param.name, place, int(owned[i])))
    found = set()
    for node in page.iter("rect"):
        said = re.fullmatch(r"rank (\d+), (?:sub-group \d+, )?(\w): (\d+) elements?", node.get("data-tip", ""))
        if said:
            x, width = (round(float(node.attrib[name][:-1]) / 100 * end) for name in ("x", "width"))
            assert width == int(said[3])
            found.add((int(said[1]), said[2], x, width))
    assert found == want


def test_bars_and_shades_of_a_plan_add_up_to_what_is_read(samples: Path) -> None:
    document = document_of("plan", samples)
    page = parsed(report("plan", document))
    said = tips(page, "Bytes that each target rank reads from each saved rank's files")
    assert len(said) == 12 and sum("nothing" not in tip for tip in said) == sum(
        len(r["sources"]) for r in document["ranks"]
    )
    assert "A load on 3 ranks reads" in words(page.find("body/main/p"))


def test_many_ranks_are_put_together_and_the_page_says_so(samples: Path) -> None:
    page = parsed(report("plan", plan_document(document_of("plan", samples), 4096, 3000, reads_from=2)))
    name = "Bytes that each target rank reads from each saved rank's files"
    said = tips(page, name)
    assert len(said) <= 48 * 48 and said[0] == "saved ranks 0\N{EN DASH}85 to target ranks 0\N{EN DASH}62: 239 MiB"
    assert "a cell is 86 saved ranks by 63 target ranks" in words(page)
    assert "The 1,000 that read most of 3,000." in words(page)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        pytest.param("inspect", "The 1,000 largest of 100,000.", marks=pytest.mark.extended),
        ("verify", "16 of 28 files with problems are drawn."),
        ("plan", "only the beginning: ranks (1,000)."),
        ("diff", "The 1,000 worst of 8,000."),
    ],
)
def test_large_reports_stay_below_5_mb_and_name_their_limits(verb: str, said: str, samples: Path) -> None:
    sample = document_of(verb, samples)
    document = {
        "inspect": lambda: inspect_document(sample, 100_000, 1000),
        "verify": lambda: verify_document(sample, 1000, range(0, 1000, 37)),
        "plan": lambda: plan_document(sample, 1000, 1000, reads_from=70),
        "diff": lambda: diff_document(sample, 8000),
    }[verb]()
    text = report(verb, document)
    assert len(text.encode()) < 5 << 20 and said in words(parsed(text))


def test_equal_checkpoints_are_called_equal(samples: Path, tmp_path: Path) -> None:
    ckpt = samples / "ckpt"
    done: Done = run_command("diff", ckpt, ckpt, "--html", tmp_path / "r.html")
    page = parsed((tmp_path / "r.html").read_text())
    assert done.returncode == 0 and "Equal: all 56 tensors bit for bit" in words(page.find("body/main/p"))
    assert not by_class(page, "bars")


def test_verify_without_payload_says_what_it_did_not_do(samples: Path, tmp_path: Path) -> None:
    assert run_command("verify", samples / "ckpt", "--quick", "--html", tmp_path / "r.html").returncode == 0
    page = parsed((tmp_path / "r.html").read_text())
    assert "were not read (--quick)" in words(page.find("body/main/p"))


def test_every_drawing_has_a_name_and_every_table_a_caption(samples: Path) -> None:
    for verb in VERBS:
        page = parsed(report(verb, document_of(verb, samples)))
        for svg in page.iter("svg"):
            assert svg.get("aria-hidden") == "true" or svg.get("aria-label") or "viewBox" in svg.attrib
        assert all(table.get("aria-label") for table in page.iter("table"))
        ids = [node.attrib["id"] for node in page.iter() if "id" in node.attrib]
        assert len(ids) == len(set(ids))


# Values in templates, axes, bins, shades, and the data in a page


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
