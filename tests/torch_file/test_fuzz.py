"""The fuzzers' targets, without their fuzzer: some inputs by chance, and every one that has once shown a mistake.

``make fuzz`` drives them by coverage for as long as it is told (benchmarks/results/fuzz.md).
"""

from __future__ import annotations

import base64
import random
import resource
import sys
from pathlib import Path

import pytest
from places import TESTS

sys.path.insert(0, str(TESTS / "fuzz"))

import readers

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.errors import CheckpointError

INPUTS = {
    "archive": 120,
    "pickle": 80,
    "record": 40,
    "tags": 30,
    "checkpoint": 16,
    "universal": 10,
    "dcp": 60,
}
SEED = 20

FOUND = {
    # a tag whose name is too long for the file system was an OSError
    "tags": b"global_step" + b"\xc3\xa9" * 120 + b"2\xffglobal_step2/zeroelastic.json\xfe{",
    # json guessed UTF-32 and imported its codec
    "record": b"\0\0\0\0\0\0\0\0\0\x0a{~",
    # a directory that places two records behind itself was a struct.error
    "archive": base64.b64decode(
        b"UEsDBBQAAAAAADYQdl2+1DdNhAAAAIQDFAAAAAAANhB2Xb7UN02EAAAAhAAAAAoAAAAAAAAAAAAAAIABAAAAAGEvZGF0YS5wa2xQ"
        b"SwECFAMUAAAAAAA2EHZdb8bVewwAAAAMAAAACAAAAAAAAAAAAAAAgAGsAAAAYS9kYXRhLzBQSwEASgMAAACFSwGFiWNjb2xsZWN0"
        b"aW9ucwpPcmRlcmVkRGljdAopUnRSLlBLAwQUAAAAAAA2EHZdb8bVewwAAAAMAAAACAAAAGEvZGF0YS8wAAAAAAAAAAAAAAAAUEsD"
        b"BBQAAAAAADYQdl3RnmdVAgAAAAIAAAAJAAAAYS92ZXJzaW9uMwpQSwECFAMUAAAAAAA2EHZdvtQ3TYQAAACEAAAACgAAAAAAAAAA"
        b"AAAAgAEAAAAAYS9kYXRhLnBrbFBLAQIUAxQAAAAAADYQdl1vxtV7DAAAAAwAAAAIAAAAAAAAAAAAAACAAawIAABhL2RhdGEvMFBL"
        b"AQIUAxQAAAAAADYQdl3RnmdVAgAAAAIAAAAJAAAAAAAAAPv///9//iH/AABhL3ZlcnNpb25QSwUGAAAAAAMAAwClAAAABwEAAAAA"
    ),
}


@pytest.mark.parametrize("name", readers.TARGETS)
def test_nothing_but_errors_of_ours_comes_out_of_any_reader(name: str, tmp_path: Path) -> None:
    target, rng = readers.TARGETS[name], random.Random(SEED)
    seeds = list(readers.seeds(name))
    for data in seeds[:: max(1, len(seeds) // 3)]:
        readers.check(target, data, tmp_path / "case", watch=False)
    for number in range(INPUTS[name]):
        seed = seeds[number % len(seeds)]
        if name in ("pickle", "checkpoint", "universal", "dcp") and rng.random() < 0.7:
            data = seed[:1] + readers.mutate_pickle(seed[1:], rng)
        else:
            data = bent(seed, rng)
        print(f"seed {SEED}, input {number}: {data[:40]!r}")  # shown where it fails
        readers.check(target, data, tmp_path / "case")


def bent(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, taken away or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) + 1)
        what = rng.randrange(3)
        if what == 0 and changed:
            changed[at % len(changed)] = rng.randrange(256)
        elif what == 1:
            del changed[at : at + rng.randint(1, 16)]
        else:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(changed)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str, tmp_path: Path) -> None:
    for data in readers.seeds(name):
        readers.check(readers.TARGETS[name], data, tmp_path / "case", watch=False)
    readers.check(readers.TARGETS[name], FOUND[name], tmp_path / "case")


def test_a_record_in_another_encoding_is_refused(tmp_path: Path) -> None:
    text = (readers.GOLDEN / "elastic2" / "global_step2" / RECORD_NAME).read_text()
    (tmp_path / RECORD_NAME).write_bytes(text.encode("utf-16"))
    with pytest.raises(CheckpointError, match=r"zeroelastic\.json: is not JSON"):
        read_record(tmp_path)


def test_the_watch_sees_what_must_not_happen(tmp_path: Path) -> None:
    def opens(data: bytes, folder: Path) -> readers.Reads:
        return (lambda: open("/etc/hostname").close(),)

    def imports(data: bytes, folder: Path) -> readers.Reads:
        return (lambda: __import__("this_module_is_nowhere"),)

    def runs(data: bytes, folder: Path) -> readers.Reads:
        return (lambda: eval("1 + 1"),)

    def fails(data: bytes, folder: Path) -> readers.Reads:
        return (lambda: {}["a"],)

    # Growth of the peak is what is measured, and this process may have been larger before.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    below_the_peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - resident

    def takes(data: bytes, folder: Path) -> readers.Reads:
        return (lambda: bytearray(below_the_peak + readers.MOST_BYTES + (64 << 20)).count(1),)

    for target in (opens, imports, runs, takes):
        with pytest.raises(readers.Broken):
            readers.check(target, b"", tmp_path / "case")
    with pytest.raises(KeyError):
        readers.check(fails, b"", tmp_path / "case")
