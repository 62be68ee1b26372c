"""Environment, fixtures and time limits of the whole test suite.

Tests run on the CPU, one thread per process, unless the environment says otherwise. The time limit of a
test is `timeout` in pyproject.toml, SLOW_TIMEOUT_S where it is marked `slow`, or the one it names itself.
The fixture `rank_pool` comes from the package's own pytest plugin, the marker `extended` from extended.py,
docs/support.md from support_table.py. Nothing here imports torch: the tests of the pure modules stay a matter of
milliseconds.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

if TYPE_CHECKING:
    from stores import S3Server

    from zeroelastic.testing import RankPool

pytest_plugins = ["zeroelastic.testing.pytest_plugin", "support_table", "extended"]

SLOW_TIMEOUT_S = 1800

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The readline of pytest's own process sets these for its children, the workers of pytest-xdist. What is printed into a
# pipe has no width, unless a test gives it one.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# gloo's thread waits for events that it cannot handle while another thread of its process sends: it takes the processor
# from that thread as soon as there is an event, and turns in a loop until that thread goes on. Where more processes run
# than there are cores, that was a sixth of the CPU time of the tests. A thread of this class waits for its turn.
# Processes inherit it.
with suppress(OSError):  # some sandboxes have one class only
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# What is imported and collected stays to the end: until then nothing is garbage (pytest_collection_finish).
gc.disable()

# A shell that runs this in the background has Ctrl-C ignored, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make warm` compiles DeepSpeed's ops here; a plain `pytest` in the same environment does not do it again.
_compiled_ops = Path(sys.prefix) / "torch_extensions"
if _compiled_ops.is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_compiled_ops))
    # With the environment's ninja: another version of it would compile all of them again.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)])

# A busy machine is no bug of ours: properties have no deadline of their own, the test's time limit holds.
settings.register_profile(
    "zeroelastic",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("zeroelastic")


# First what one test or one fixture takes a minute for: workers that are done take over what is last in the line, and
# in the end none waits for another's long test or makes its fixture again.
LONG = (
    "test_versions.py",
    "test_bench_load_save.py",
    "test_benchmarks.py",
    "test_docs.py",
    "test_example_programs.py",
    "test_elastic_cluster.py",
    "test_lifecycle.py",
    "test_campaigns.py",
    "test_native_executor.py",
    "test_trl.py",
    "test_fsdp2_jobs.py",
    "test_wheel.py",
    "test_site.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few-examples", action="store_true", help="a quarter of the examples of each property")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("few_examples"):
        for property_ in {item.function for item in items if is_hypothesis_test(getattr(item, "function", None))}:
            own = property_._hypothesis_internal_use_settings
            property_._hypothesis_internal_use_settings = settings(own, max_examples=max(5, own.max_examples // 4))
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is marked ``gpu(num)`` where there are fewer GPUs that ranks of a NCCL run can use."""
    for marker in item.iter_markers("gpu"):
        import torch

        (needed,) = marker.args or (1,)
        usable = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        if (found := torch.cuda.device_count() if usable else 0) < needed:
            pytest.skip(f"needs {needed} GPU(s) usable with NCCL, found {found}")


def pytest_collection_finish() -> None:
    """From here, the collector looks only at what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def rank_pool_preload() -> tuple[str, ...]:
    """What takes many ranks seconds to import: s3fs, and the models of ``topologies``."""
    from topologies import PRELOADED

    return ("s3fs", *PRELOADED)


@pytest.fixture(scope="session")
def topology_pool(rank_pool: RankPool) -> RankPool:
    """The same: a pool of their own would cost each worker as much."""
    return rank_pool


@pytest.fixture(scope="session")
def mounts() -> None:
    """Skips a test where a process may have no mounts of its own."""
    from saves import MOUNTS_NEED, can_mount

    if not can_mount():
        pytest.skip(MOUNTS_NEED)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server of object storage on this machine."""
    from stores import serve_s3

    with serve_s3() as server:
        yield server


@pytest.fixture
def calm(s3: S3Server) -> Iterator[S3Server]:
    """The server, without faults before and after."""
    from stores import forget_clients

    s3.requests.clear()
    yield s3
    s3.fault = None
    s3.reset_access(allow=True)
    forget_clients()
