"""The native engine beyond reading: digests, conversions, copies, writes, moves, threads, forks and the build."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import DTYPES, UNTOUCHED, Case, Engine, cases, convert, expected, patterns, run_case, segment
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from programs import copy_sources, run_program, run_python

from zeroelastic.core.digest import digest_range
from zeroelastic.errors import ConfigError
from zeroelastic.executors import dispatch, native_executor
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import Cast, CopyTable, DigestRows
from zeroelastic.executors.native_executor import instruction_set, limit_instruction_set
from zeroelastic.executors.tables import default_threads

copy_segments = functools.partial(dispatch.copy_segments, executor="native")
move_segments = functools.partial(dispatch.move_segments, executor="native")
read_segments = functools.partial(dispatch.read_segments, executor="native")


BUILD = describe_build("native")
BEST = instruction_set() if BUILD.usable else "plain"
INSTRUCTION_SETS = ["plain", "avx2", "avx512"]

native = pytest.mark.skipif(not BUILD.usable, reason=f"the native engine is not built: {BUILD.reason}")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def each_instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once with the kernels of each instruction set that this processor has."""
    if not BUILD.usable:
        pytest.skip(f"the native engine is not built: {BUILD.reason}")
    if limit_instruction_set(request.param) != request.param:
        limit_instruction_set(BEST)
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    limit_instruction_set(BEST)


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def table_of(rows: list[tuple[int, int, int, int, int]]) -> CopyTable:
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 5).T
    return CopyTable(*(np.ascontiguousarray(column) for column in columns))


def digest_rows(num_rows: int, itemsize: int) -> DigestRows:
    rng = np.random.default_rng(0)
    return DigestRows(
        seeds=rng.integers(0, 2**64, 2, dtype=np.uint64),
        stream=rng.integers(0, 2, num_rows),
        start=rng.integers(0, 2**40, num_rows),
        itemsize=np.full(num_rows, itemsize, dtype=np.int64),
    )


# --- digest ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    count=st.one_of(st.integers(0, 40), st.integers(0, 9_000)),
    misaligned=st.integers(0, 70),
    start=st.one_of(st.integers(0, 3000), st.integers(0, 2**45)),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_digest_equals_the_reference(
    each_instruction_set: str, itemsize: int, count: int, misaligned: int, start: int, seed: int
) -> None:
    data = random_bytes(misaligned + count * itemsize, seed=count)[misaligned:]
    want = digest_range(data, itemsize, seed=seed, start=start)
    assert native_executor.digest_range(data, itemsize, seed=seed, start=start, threads=1) == want


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_the_digest_of_extreme_values_wraps_like_the_reference(each_instruction_set: str, itemsize: int) -> None:
    data = np.full(50_000 * itemsize, 0xFF, dtype=np.uint8)
    want = digest_range(data, itemsize, seed=2**64 - 1, start=2**45 + 5)
    assert native_executor.digest_range(data, itemsize, seed=2**64 - 1, start=2**45 + 5) == want


@native
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_digest_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    data = random_bytes(9_000_004)
    want = digest_range(data, 4, seed=11, start=1000)
    assert native_executor.digest_range(data, 4, seed=11, start=1000, threads=threads) == want
    assert dispatch.digest_range(data, 4, seed=11, start=1000) == want


# --- conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", DTYPES)
def test_conversions_are_torch_bit_for_bit(each_instruction_set: str, cast: Cast) -> None:
    src = patterns(cast)
    want = convert(cast, src)
    for shift in (0, 2, 6):  # in bytes, of a destination that is aligned otherwise
        dst = np.zeros(len(want) + shift, dtype=np.uint8)
        copy_segments(segment(0, shift, len(src)), [src], [dst], cast=cast)
        assert np.array_equal(dst[shift:], want)


@pytest.mark.parametrize("cast", DTYPES)
def test_what_is_written_past_the_caches_is_converted_the_same(each_instruction_set: str, cast: Cast) -> None:
    """More than the last-level cache of most processors holds, with a misaligned head and tail."""
    size = DTYPES[cast][0].itemsize
    part = torch.randn(1_000_003).to(DTYPES[cast][0]).view(torch.uint8).numpy()
    repeats = 72_000_000 // len(part) + 1
    src, want = np.tile(part, repeats), np.tile(convert(cast, part), repeats)
    assert len(src) % size == 0
    dst = np.zeros(len(want) + 2, dtype=np.uint8)
    copy_segments(segment(0, 2, len(src)), [src], [dst], cast=cast, threads=2)
    assert np.array_equal(dst[2:], want)


# --- copies, writes and moves ---------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), threads=st.integers(1, 3))
def test_every_table_moves_what_numpy_slices_move(
    each_instruction_set: str, folder: Path, data: st.DataObject, threads: int
) -> None:
    """Read, copied, written and moved, with digests and conversions."""
    case = data.draw(cases())
    want, digests = expected(case)
    for operation in ("read", "copy", "write", "move"):
        made, totals = run_case(operation, Engine("native"), case, folder, digest=case.digest, threads=threads)
        assert made == [part.tobytes() for part in want]
        assert totals is not None and totals.tolist() == digests


def test_long_misaligned_copies_past_the_caches(each_instruction_set: str) -> None:
    """More than the last-level cache holds, so that the streaming kernel runs, at every kind of misalignment."""
    src = random_bytes(72_000_000)
    cuts = [0, 1, 5_000_003, 5_000_100, 30_000_007, 30_016_500, 71_999_999]
    rows, at = [], 3
    for begin, end in reversed(list(pairwise(cuts))):
        rows.append((0, begin, 0, at, end - begin))
        at += end - begin + 1
    case = Case((src,), (at,), 0, table_of(rows), digest_rows(len(rows), 1), "none")
    (want,), digests = expected(case)
    for digest in (case.digest, None):
        dst = np.full(at, UNTOUCHED, dtype=np.uint8)
        totals = copy_segments(case.rows, [src], [dst], digest=digest, threads=2)
        assert np.array_equal(dst, want)
        assert digest is None or (totals is not None and totals.tolist() == digests)


MEMORY = """
    import re, sys
    from pathlib import Path
    import numpy as np
    from zeroelastic.executors.dispatch import CopyTable, Ranges, move_segments, scan_segments

    src, dst, cast, size = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

    def run(nbytes):
        zero = np.zeros(1, dtype=np.int64)
        if cast == "scan":
            crc32 = np.zeros(1, dtype=np.uint32)
            scan_segments(Ranges(zero, zero, zero + nbytes), (src,), crc32=crc32, threads=4)
        else:
            move_segments(CopyTable(zero, zero, zero, zero, zero + nbytes), [src], [dst], cast=cast, threads=4)

    def most():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

    run(1000)
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    before = most()
    run(size)
    print(most() - before)
"""


@native
@pytest.mark.parametrize("cast", ["scan", "none", "float32->bfloat16", "bfloat16->float32"])
def test_scans_and_moves_use_at_most_1_mib_per_thread(tmp_path: Path, cast: str) -> None:
    src, dst, size = tmp_path / "src", tmp_path / "dst", 24 << 20
    for path in (src, dst):
        path.touch()
        os.truncate(path, 2 * size)
    done = run_python("-c", textwrap.dedent(MEMORY), src, dst, cast, size)
    assert int(done.stdout) <= (4 << 20) + (512 << 10)  # and stacks and tables


# --- failures -------------------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize(
    ("column", "value"), [("stream", 2), ("stream", -1), ("start", -1), ("itemsize", 3), ("itemsize", 8)]
)
def test_a_digest_row_that_makes_no_sense_is_refused(column: str, value: int) -> None:
    columns = {"stream": 0, "start": 0, "itemsize": 4, column: value}
    digest = DigestRows(
        np.array([1, 2], dtype=np.uint64), **{k: np.array([v], dtype=np.int64) for k, v in columns.items()}
    )
    with pytest.raises(AssertionError, match="row 0 of a segment table"):
        copy_segments(segment(0, 0, 12), [random_bytes(12)], [np.zeros(12, dtype=np.uint8)], digest=digest)


@native
def test_a_read_only_destination_is_refused() -> None:
    dst = np.zeros(8, dtype=np.uint8)
    dst.flags.writeable = False
    with pytest.raises(AssertionError, match="read-only"):
        copy_segments(segment(0, 0, 8), [random_bytes(8)], [dst])


# --- threads and forks ----------------------------------------------------------------------------------------------


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@native
def test_threads_start_with_the_first_work_not_with_the_import() -> None:
    script = """
        import os
        import numpy as np
        from zeroelastic.executors import build_info, native_executor
        count = lambda: len(os.listdir("/proc/self/task"))
        before = count()
        build_info.load_library("native")
        data = np.ones(8 << 20, dtype=np.uint8)
        native_executor.digest_range(data[:100], 4, seed=1, start=0, threads=4)
        idle = count()
        native_executor.digest_range(data, 4, seed=1, start=0, threads=4)
        print(idle - before, count() - before)
    """
    # numpy's own threads do not matter: only those that come are counted.
    done = run_python("-c", textwrap.dedent(script))
    assert done.stdout.split() == ["0", "3"]


def _digest_in_child(results: multiprocessing.Queue[tuple[int, int]]) -> None:
    before = num_threads()
    value = native_executor.digest_range(random_bytes(8_000_000), 4, seed=3, start=5, threads=3)
    results.put((num_threads() - before, value))


@native
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_engine_works_in_a_forked_child() -> None:
    """The child has none of the parent's threads and makes its own."""
    data = random_bytes(8_000_000)
    want = digest_range(data, 4, seed=3, start=5)
    assert native_executor.digest_range(data, 4, seed=3, start=5, threads=3) == want
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_digest_in_child, args=(results,))
    child.start()
    more, value = results.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert value == want and more >= 2
    assert native_executor.digest_range(data, 4, seed=3, start=5, threads=3) == want


@native
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    data = [random_bytes(3_000_000, seed=i) for i in range(4)]
    want = [digest_range(d, 4, seed=i, start=i) for i, d in enumerate(data)]
    got: dict[int, set[int]] = {i: set() for i in range(4)}

    def work(i: int) -> None:
        for _ in range(20):
            got[i].add(native_executor.digest_range(data[i], 4, seed=i, start=i, threads=3))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert [got[i] for i in range(4)] == [{value} for value in want]


def test_the_number_of_threads_is_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROELASTIC_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert default_threads() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert default_threads() == 1
    monkeypatch.setenv("ZEROELASTIC_THREADS", "5")
    assert default_threads() == 5
    monkeypatch.setenv("ZEROELASTIC_THREADS", "0")
    with pytest.raises(ConfigError, match="ZEROELASTIC_THREADS is '0'"):
        default_threads()


# --- the build ------------------------------------------------------------------------------------------------------


@native
def test_the_build_says_what_made_it() -> None:
    assert BUILD.path.is_file() and BUILD.reason == ""
    assert BUILD.compiler.startswith(("gcc", "clang"))


HEADERS = ("csrc/zeroelastic.h", "csrc/cuda/zeroelastic_cuda.h")
STRUCTURES = {
    "ze_error": native_executor.Error,
    "ze_table": native_executor.TableStruct,
    "ze_files": native_executor.Files,
    "ze_buffers": native_executor.Buffers,
    "ze_digest": native_executor.Digest,
    "ze_progress": native_executor.ProgressStruct,
    "ze_options": native_executor.CallOptions,
}


@native
@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("header", HEADERS)
def test_the_headers_are_c_and_cpp(header: str, language: str) -> None:
    command = ["g++", "-x", language, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(ROOT / header)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@native
def test_the_structures_have_the_fields_and_offsets_of_the_header(tmp_path: Path) -> None:
    lines = [f'#include "{ROOT / HEADERS[0]}"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    expected = []
    for name, structure in STRUCTURES.items():
        lines.append(f'    printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            lines.append(f'    printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join([*lines, "    return 0;", "}", ""]))
    subprocess.run(["g++", "-x", "c", source, "-o", program], check=True, timeout=60)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.split("\n")[:-1] == expected


@native
def test_a_library_from_an_older_build_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroelastic.executors import build_info

    monkeypatch.setattr(build_info, "ABI_VERSION", build_info.ABI_VERSION + 1)
    build_info._load.cache_clear()
    try:
        found = describe_build("native")
        assert not found.usable and "older build" in found.reason
        with pytest.raises(ConfigError, match="ZEROELASTIC_BUILD_NATIVE=1 pip install"):
            build_info.load_library("native")
    finally:
        build_info._load.cache_clear()


def pip_install(target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # setup.py leaves its intermediate files where it runs: not in the tree that the tests run in.
    source = target.parent / "source"
    shutil.rmtree(source, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "ZEROELASTIC_BUILD_CUDA": "0", **env}
    return run_program(*command, "--target", target, copy_sources(source), timeout=600, **env)


INSTALLED = """
    import numpy as np
    from pathlib import Path
    from zeroelastic.executors.dispatch import CopyTable, choose_executor, describe_build, read_segments
    info = describe_build("native")
    column = lambda value: np.array([value])
    Path("x.bin").write_bytes(b"0123456789")
    buffer = np.zeros(4, dtype=np.uint8)
    read_segments(CopyTable(*map(column, (0, 3, 0, 0, 4))), (Path("x.bin"),), [buffer])
    print(choose_executor("auto"), buffer.tobytes().decode(), info.reason)
"""


def run_installed(target: Path) -> str:
    return run_python("-c", textwrap.dedent(INSTALLED), path=[target], cwd=target).stdout.strip()


@pytest.mark.extended
@pytest.mark.slow
def test_without_a_compiler_the_package_installs_and_works(tmp_path: Path) -> None:
    done = pip_install(tmp_path / "target", CXX="/bin/false")
    assert done.returncode == 0, done.stderr
    assert run_installed(tmp_path / "target") == "numpy 3456 /bin/false failed with exit code 1"
    done = pip_install(tmp_path / "other", CXX="/bin/false", ZEROELASTIC_BUILD_NATIVE="1")
    assert done.returncode != 0
    assert "the native engine was not built: /bin/false failed" in done.stdout + done.stderr
    done = pip_install(tmp_path / "third", ZEROELASTIC_BUILD_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert run_installed(tmp_path / "third").startswith("numpy 3456 ZEROELASTIC_BUILD_NATIVE=0 was set")


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.skipif(not BUILD.usable, reason="there is no compiler to build with")
def test_an_installed_package_has_its_native_engine(tmp_path: Path) -> None:
    done = pip_install(tmp_path / "target", ZEROELASTIC_BUILD_NATIVE="1")
    assert done.returncode == 0, done.stderr
    assert run_installed(tmp_path / "target") == "native 3456"


@pytest.mark.extended
@pytest.mark.slow
def test_the_cpp_tests_pass() -> None:
    """Under the address and undefined-behaviour sanitizers; `make test-native` has the plain build and threads, too."""
    compiler = os.environ.get("CXX", sysconfig.get_config_var("CXX") or "c++").split()[0]
    if not (shutil.which(compiler) and shutil.which("make")):
        pytest.skip("there is no compiler")
    done = run_program("make", "-j2", "-C", ROOT / "csrc", "asan", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
