"""Verbs and opened checkpoints leave no file, thread or mapping open, also where the garbage collector does not run.

In a process with many objects the collector looks at old ones once in a long while: what waits for it is as good as
left behind.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import zeroelastic
from zeroelastic.errors import UsageError, ZeroElasticError

GOLDEN = Path(__file__).parent.parent / "golden"
MATRIX = "model.layers.0.mlp.up_proj.weight"


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held() -> tuple[list[str], int, list[str]]:
    """What this process has open: descriptors, threads, files that are mapped."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[-1] for line in maps if line.endswith(".pt")]
    return sorted(links), threading.active_count(), mapped


@pytest.fixture(scope="module")
def sources(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints whole and damaged in several ways, and what is none."""
    root = tmp_path_factory.mktemp("sources")

    def damaged(name: str, pattern: str, change: Callable[[bytes], bytes]) -> Path:
        shutil.copytree(GOLDEN / "rigid3", root / name)  # without a commit record: what is wrong shows when it is read
        path = next((root / name / "global_step2").glob(pattern))
        path.write_bytes(change(path.read_bytes()))
        return root / name

    short = damaged("short", "*rank_1*model_states.pt", lambda data: data[: len(data) // 2])
    foreign = damaged("foreign", "*rank_1*optim_states.pt", lambda data: b"\x80garbage" * 100)
    flipped = damaged("flipped", "*rank_1*optim_states.pt", lambda data: data.replace(b"\0" * 8, b"\1" * 8))
    return [samples / "elastic", GOLDEN / "stage2_rank2", GOLDEN / "fsdp2/ckpt", short, foreign, flipped, root]


def read_all(src: Path) -> None:
    with zeroelastic.open(src) as ck:
        for name in ck:
            ck[name].numpy()
        _ = [ck.optimizer(name) for group in ck.groups for name in group.params], ck.client_state


def read_some(src: Path) -> None:
    """Without ``close``, and with an iterator that is left in the middle."""
    ck = zeroelastic.open(src)
    next(ck[next(iter(ck))].windows(8))


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "inspect": lambda src, _: zeroelastic.inspect(src),
    "inspect, a tensor": lambda src, _: zeroelastic.inspect(src, tensor=next(iter(zeroelastic.open(src)))),
    "verify": lambda src, _: zeroelastic.verify(src),
    "verify_all": lambda src, _: zeroelastic.verify_all(src),
    "diff": lambda src, _: zeroelastic.diff(src, src),
    "plan": lambda src, _: zeroelastic.plan(src, world_size=3),
    "ls": lambda src, _: zeroelastic.ls(src),
    "latest": lambda src, _: zeroelastic.latest(src),
    "prune": lambda src, _: zeroelastic.prune(src, keep=1),
    "reshard": lambda src, dst: zeroelastic.reshard(src, dst, world_size=3, verify=True),
    "export": lambda src, dst: zeroelastic.export(src, dst),
    "fsdp2": lambda src, dst: zeroelastic.convert(src, dst, to="fsdp2"),
    "from_fsdp2": lambda src, dst: zeroelastic.convert(src, dst, from_="fsdp2", world_size=2),
    "open": lambda src, _: read_all(src),
    "open, not closed": lambda src, _: read_some(src),
}


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_stays_open(verb: str, sources: list[Path], tmp_path: Path) -> None:
    def call(number: int) -> None:
        for src in sources:
            with suppress(ZeroElasticError):
                VERBS[verb](src, tmp_path / f"{src.parent.name}-{src.name}-{number}")

    call(0)
    with without_collector():
        before = held()
        call(1)
        assert held() == before


def test_close_closes_though_the_view_and_its_handles_live_on(samples: Path) -> None:
    before = held()
    with zeroelastic.open(samples / "elastic") as ck:
        kept = (ck, ck[MATRIX], ck.client_state, ck.path, ck.places(MATRIX))
        ck[MATRIX].numpy()
    assert held() == before
    assert ck.step == 4 and os.listdir(ck.path)
    with pytest.raises(UsageError, match="was closed"):
        kept[1].numpy()


def test_the_path_of_a_view_is_a_source_like_any_other(samples: Path, tmp_path: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        assert zeroelastic.inspect(ck.path).path == str(samples / "elastic/global_step4")
        report = zeroelastic.reshard(ck.path, tmp_path / "made", world_size=3)
        assert report.tag == "global_step4"
        place = ck.path / ck.places(MATRIX)[0].file
        assert place.with_suffix(".pt").read_bytes() == place.read_bytes()


@pytest.mark.parametrize("export", [False, True])
def test_a_target_that_cannot_be_begun_leaves_nothing(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: bool
) -> None:
    """Neither the hidden directory nor its lock, which would keep the same process from trying again."""

    def write() -> None:
        if export:
            zeroelastic.export(samples / "elastic", tmp_path / "out")
        else:
            zeroelastic.reshard(samples / "elastic", tmp_path / "out", world_size=2)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    before = held()
    for name in ("write_atomically", "note_owner"):
        with monkeypatch.context() as patch:
            patch.setattr(f"zeroelastic.verbs.new_directory.{name}", fail)
            with pytest.raises(OSError, match="No space"):
                write()
        assert held() == before and not any(tmp_path.iterdir())
    write()
