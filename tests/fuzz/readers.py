"""What the readers of files make of any bytes: one function per reader, and what must hold for each.

A target gets bytes, puts them where a checkpoint has them, and reads. Only errors of ours may come out; nothing is
imported, run or sent; no file outside of the target's own directory is opened, and none is changed; memory stays within
256 MiB. Seeds are the small checkpoints in tests/golden, which DeepSpeed wrote. Nothing here needs a fuzzer: ``run.py``
drives it by coverage, tests/torch_file/test_fuzz.py by chance.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickletools
import random
import resource
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record, record_text
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.dcp.metadata import METADATA
from zeroelastic.dcp.saved import open_dcp
from zeroelastic.errors import ZeroElasticError
from zeroelastic.runs.locate import find_source, list_tags
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, find_newest
from zeroelastic.torch_file.archive import write_tree
from zeroelastic.torch_file.header import directory_digest, read_torch_file, read_tree, walk_refs
from zeroelastic.torch_file.zip_check import read_zip_records
from zeroelastic.verbs.convert.from_universal import find_universal, open_universal
from zeroelastic.verbs.diff import diff
from zeroelastic.verbs.inspect.inspect import inspect_source
from zeroelastic.verbs.model_tensors import model_tensors

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
CHECKPOINTS = ("elastic2", "rigid2", "stage2_rank2", "stage1_rank2")
MOST_BYTES = 256 << 20
"""What reading one file may add to the memory of the process."""

Reads = tuple[Callable[[], object], ...]
Target = Callable[[bytes, Path], Reads]
"""Puts bytes into a directory, and says what is then to be read there."""


class Broken(Exception):
    """Something that must never happen while a file is read."""


# ---- the targets ----


def archive(data: bytes, folder: Path) -> Reads:
    """A torch.save file, zip structure and all."""
    path = folder / "f.pt"
    path.write_bytes(data)
    return _every_reader(path)


def pickle_stream(data: bytes, folder: Path) -> Reads:
    """A pickle in an archive that is as it should be, with the storages of a real file."""
    path = folder / "f.pt"
    path.write_bytes(repacked(_golden_files()[data[0] % len(_golden_files())] if data else None, data[1:]))
    return _every_reader(path)


def commit_record(data: bytes, folder: Path) -> Reads:
    """``zeroelastic.json`` beside files that are as they should be."""
    tag = _golden_copy("elastic2", folder)
    (tag / RECORD_NAME).write_bytes(data)
    return (lambda: read_record(tag), lambda: open_checkpoint(tag), lambda: RunStore(tag.parent).require_tags())


def tag_scan(data: bytes, folder: Path) -> Reads:
    """``latest``, and directories and files of any name; parts are separated by 0xff."""
    root = folder / "run"
    root.mkdir()
    latest, *names = data.split(b"\xff")[:12]
    (root / "latest").write_bytes(latest)
    (root / "latest_universal").write_bytes(latest)
    for name in names:
        head, _, content = name.partition(b"\xfe")
        parts = [part for part in head.split(b"/") if part and part not in (b".", b"..") and b"\0" not in part]
        if not parts or any(len(part) > 250 for part in parts):
            continue
        path = Path(os.fsdecode(os.path.join(os.fsencode(root), *parts[:3])))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return (
        lambda: find_source(root),
        lambda: list_tags(root),
        lambda: find_newest(RunStore(root).tags(), check_quickly),
        lambda: open_universal(find_universal(root).tag_dir),  # type: ignore[arg-type]
        lambda: open_checkpoint(find_source(root).tag_dir),
    )


def checkpoint(data: bytes, folder: Path) -> Reads:
    """A checkpoint of two ranks of which one file's pickle is the fuzzer's: how it is opened, shown and compared."""
    which = data[0] if data else 0
    name, path = _chosen(which)
    tag = _golden_copy(name, folder)
    path = tag / path.name
    path.write_bytes(repacked(path, data[1:]))
    _believe_sizes(tag)  # the record, if there is one, would notice that the size has changed

    def state() -> None:
        opened = open_state(open_checkpoint(tag))
        model_tensors(opened)

    good = GOLDEN / name / "global_step2"
    others: Reads = (
        lambda: inspect_source(find_source(tag)),
        lambda: find_newest(RunStore(tag.parent).tags(), check_quickly),
        lambda: diff(good, tag),
    )
    return (state, *others[which // 32 % 6 : which // 32 % 6 + 1])


def universal(data: bytes, folder: Path) -> Reads:
    """A Universal checkpoint of which one file's pickle is the fuzzer's."""
    tag = folder / "run" / "universal"
    shutil.copytree(universal_seed(), tag)
    files = sorted(tag.rglob("*.pt"))
    path = files[data[0] % len(files)] if data else files[0]
    path.write_bytes(repacked(path, data[1:]))
    (tag.parent / "latest_universal").write_text("universal")
    return (lambda: open_universal(find_universal(tag.parent).tag_dir),)  # type: ignore[arg-type]


def dcp_table(data: bytes, folder: Path) -> Reads:
    """A checkpoint of FSDP2 whose table ``.metadata`` is the fuzzer's, behind a byte that counts for nothing."""
    root = folder / "run"
    shutil.copytree(GOLDEN / "fsdp2" / "ckpt", root)
    (root / METADATA).write_bytes(data[1:])

    def extents() -> None:
        found = open_dcp(root)
        for part in (found.trained, found.frozen):
            for rank in range(part.layout.world_size):
                rows = part.rank_rows(rank)[1]
                ends = rows.file_offset + rows.nbytes
                sizes = [path.stat().st_size for path in rows.paths]
                if any(end > sizes[file] for end, file in zip(ends.tolist(), rows.file.tolist(), strict=True)):
                    raise Broken("a chunk reaches outside of its file")

    return (extents,)


TARGETS: dict[str, Target] = {
    "archive": archive,
    "pickle": pickle_stream,
    "record": commit_record,
    "tags": tag_scan,
    "checkpoint": checkpoint,
    "universal": universal,
    "dcp": dcp_table,
}


def _every_reader(path: Path) -> Reads:
    def parsed(foreign: str) -> None:
        file = read_torch_file(path, foreign=foreign)  # type: ignore[arg-type]
        for ref in walk_refs(file.root):
            with contextlib.suppress(ZeroElasticError):
                extent = file.extent(ref)
                if not 0 <= extent.offset <= extent.offset + extent.nbytes <= file.size:
                    raise Broken(f"an extent reaches outside of the file: {extent}")

    def graph() -> None:
        for storage in write_tree(read_tree(path))[1]:
            extent = storage.extent
            if extent is None or not 0 <= extent.offset <= extent.offset + extent.nbytes <= path.stat().st_size:
                raise Broken(f"a storage reaches outside of the file: {extent}")

    def structure() -> None:
        size = path.stat().st_size
        for record in read_zip_records(path, size):
            if not 0 <= record.offset <= record.offset + record.nbytes <= size:
                raise Broken(f"a record reaches outside of the file: {record}")

    return (lambda: parsed("refuse"), lambda: parsed("inert"), graph, structure)


# ---- files ----


def repacked(like: Path | None, pickled: bytes) -> bytes:
    """An archive as torch.save lays it out around a pickle, with the other records of an existing one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new, zipfile.ZipFile(like or _golden_files()[0]) as old:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("/data.pkl") else old.read(info))
    return out.getvalue()


def pickle_of(path: Path) -> bytes:
    """The pickle of a torch.save file."""
    with zipfile.ZipFile(path) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/data.pkl")))


def _golden_files() -> list[Path]:
    return sorted(GOLDEN.glob("*2/*/*.pt"))


def _golden_copy(name: str, folder: Path) -> Path:
    root = folder / "run"
    shutil.copytree(GOLDEN / name, root)
    return root / "global_step2"


def _chosen(which: int) -> tuple[str, Path]:
    """A golden checkpoint, and one of its files."""
    name = CHECKPOINTS[which % len(CHECKPOINTS)]
    files = sorted((GOLDEN / name / "global_step2").glob("*.pt"))
    return name, files[which // len(CHECKPOINTS) % len(files)]


def _believe_sizes(tag: Path) -> None:
    """Write the record anew, with the sizes and the zip directories of the files as they are now."""
    record = read_record(tag)
    if record is not None:
        files = {name: (tag / name).stat().st_size for name in record.files}
        digests = {name: directory_digest(tag / name) for name in record.directories}
        (tag / RECORD_NAME).write_bytes(record_text(record.model_copy(update={"files": files, "directories": digests})))


_universal: list[Path] = []


def universal_seed() -> Path:
    """A small Universal checkpoint, made of the golden one by hand: what is in its files is cut from nothing."""
    if not _universal:
        import tempfile

        root = Path(tempfile.mkdtemp(prefix="zeroelastic_fuzz_")) / "universal"
        root.mkdir()
        golden = GOLDEN / "rigid2" / "global_step2"
        shutil.copy(golden / "zero_pp_rank_0_mp_rank_00_model_states.pt", root)
        shutil.copy(golden / "zero_pp_rank_1_mp_rank_00_model_states.pt", root)
        optim = next(golden.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        (root / "zero").mkdir()
        shutil.copy(optim, root / "zero" / "optimizer_state.pt")
        model = open_checkpoint(golden).model_states(0)
        for params in model.sub_groups:
            for param in params:
                for key in ("fp32", "exp_avg", "exp_avg_sq"):
                    path = root / "zero" / param.name / f"{key}.pt"
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(tensor_file(param.numel))
        _universal.append(root)
    return _universal[0]


def tensor_file(numel: int) -> bytes:
    """A torch.save file of one float32 tensor of zeros."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    count = b"J" + struct.pack("<i", numel)
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + count + b"tQK\x00" + count
        + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/data/0", bytes(4 * numel))
        file.writestr("a/version", b"3\n")
    return out.getvalue()


def seeds(name: str) -> Iterator[bytes]:
    """Inputs of a target that are, or nearly are, what an honest writer leaves."""
    files = _golden_files()
    if name == "archive":
        yield from (path.read_bytes() for path in files)
        yield tensor_file(3)
    elif name == "pickle":
        yield from (bytes([number]) + pickle_of(path) for number, path in enumerate(files))
    elif name == "record":
        golden = GOLDEN / "elastic2" / "global_step2"
        yield (golden / RECORD_NAME).read_bytes()
    elif name == "tags":
        head = (GOLDEN / "elastic2" / "global_step2" / RECORD_NAME).read_bytes()[:600]
        model = files[1].read_bytes()
        rank_file = b"/zero_pp_rank_0_mp_rank_00_model_states.pt"
        yield b"global_step2\n\xffglobal_step2/zeroelastic.json\xfe" + head
        yield b"global_step2\xffglobal_step2" + rank_file + b"\xfe" + model.replace(b"\xff", b"").replace(b"\xfe", b"")
        yield b"../x\xffcheckpoint-3/global_step3" + rank_file + b"\xff" + b"checkpoint-3/latest\xfeglobal_step3"
        yield b"u\xffu/zero/p/fp32.pt\xfe\xffu" + rank_file + b"\xffu/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    elif name == "checkpoint":
        yield from (bytes([which]) + pickle_of(_chosen(which)[1]) for which in range(32, 128))
    elif name == "dcp":
        yield b"\0" + (GOLDEN / "fsdp2" / "ckpt" / METADATA).read_bytes()
    else:
        for number, path in enumerate(sorted(universal_seed().rglob("*.pt"))):
            yield bytes([number]) + pickle_of(path)


# ---- pickles, bent opcode by opcode ----

_INTS = (0, 1, 2, -1, 255, 65535, (1 << 31) - 1, -(1 << 31), 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64)
_GLOBALS = (
    b"os\nsystem", b"builtins\neval", b"builtins\ngetattr", b"builtins\nset", b"collections\nOrderedDict",
    b"torch\nSize", b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_parameter", b"_codecs\nencode",
    b"torch._utils\n_rebuild_tensor_v3", b"torch._tensor\n_rebuild_from_type_v2", b"torch\nFloatStorage",
    b"torch\nfloat32", b"numpy\ndtype", b"numpy.core.multiarray\nscalar", b"copyreg\n_reconstructor",
    b"deepspeed.runtime.fp16.loss_scaler\nLossScaler", b"deepspeed.runtime.zero.config\nZeroStageEnum",
)  # fmt: skip
_SINGLE = b"(01NR])}abetsuQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"


def mutate_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle like another one: some of its opcodes taken away, doubled, exchanged, or with other arguments."""
    ops = _split(data)
    if not ops:
        return data
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(ops))
        what = rng.randrange(8)
        if what == 0:
            del ops[at : at + rng.randint(1, 4)]
            ops = ops or [b"."]
        elif what == 1:
            ops[at:at] = ops[at : at + rng.randint(1, 8)] * rng.choice((1, 2, 50))
        elif what == 2:
            ops[at] = ops[rng.randrange(len(ops))]
        elif what == 3:
            ops.insert(at, _SINGLE[rng.randrange(len(_SINGLE)) :][:1])
        elif what == 4:
            ops.insert(at, b"c" + rng.choice(_GLOBALS) + b"\n")
        elif what == 5:
            ops[_like(ops, at, b"KMJ\x8a")] = _long(rng.choice(_INTS))
        elif what == 6:
            ops[_like(ops, at, b"c")] = b"c" + rng.choice(_GLOBALS) + b"\n"
        else:
            text = _like(ops, at, b"X")
            ops[text] = ops[_like(ops, rng.randrange(len(ops)), b"X")]
    return b"".join(ops)


def _like(ops: list[bytes], at: int, codes: bytes) -> int:
    """The next place of an opcode of some kind."""
    return next((i for i in (*range(at, len(ops)), *range(at)) if ops[i][:1] in {bytes([c]) for c in codes}), at)


def _long(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _split(data: bytes) -> list[bytes]:
    places: list[int] = []
    try:
        for _, _, at in pickletools.genops(data):
            places.append(at or 0)
    except Exception:  # where it cannot be read on, the rest is one piece
        pass
    return [data[begin:end] for begin, end in itertools.pairwise([*places, len(data)])]


# ---- what must not happen ----

_NEVER = (
    "import", "exec", "compile", "pickle.find_class", "marshal.", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
    "os.fork", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.symlink", "os.link", "os.chmod",
    "subprocess.", "socket.", "ctypes.dlopen", "ctypes.dlsym", "urllib.", "webbrowser.", "sys.addaudithook",
)  # fmt: skip
_watched: list[Path] = []
_hooked = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if not _watched:
        return
    if event == "open":
        path, _mode, flags = args
        where = os.path.realpath(os.fsdecode(path)) if isinstance(path, (str, bytes)) else ""
        allowed = (str(_watched[0]), str(GOLDEN))
        inside = where.startswith(allowed) or where.startswith(("/proc/self", "/usr/share/zoneinfo"))
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if where and (not inside or (writes and where.startswith(str(GOLDEN)))):
            _watched.clear()
            raise Broken(f"a reader opens {where}")
    elif event.startswith(_NEVER) and not _is_known_import(event, args):
        _watched.clear()
        raise Broken(f"a reader causes {event} {args!r:.200}")


def _is_known_import(event: str, args: tuple[object, ...]) -> bool:
    """An import within a function of ours or of a library, of what has been imported before."""
    return event == "import" and str(args[0]) in sys.modules


def check(target: Target, data: bytes, folder: Path, *, watch: bool = True) -> None:
    """Run a target in an empty directory under watch. Raises Broken, or what a reader raises that is not ours.

    Without ``watch``, modules may be imported: the first inputs need it.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    try:
        for read in target(data, folder):
            with _watching(folder) if watch else contextlib.nullcontext(), contextlib.suppress(ZeroElasticError):
                read()
    finally:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > MOST_BYTES:
        raise Broken(f"reading took {grown >> 20} MiB")


@contextlib.contextmanager
def _watching(folder: Path) -> Iterator[None]:
    _watched[:] = [Path(os.path.realpath(folder))]
    try:
        yield
    finally:
        _watched.clear()
