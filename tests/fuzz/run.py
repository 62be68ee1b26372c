"""One reader under atheris, whose coverage says which inputs are worth keeping: ``run.py TARGET CORPUS [OPTION]...``.

Inputs that hold a pickle are bent opcode by opcode as well as byte by byte. Whatever the target raises ends the run;
the input is left in a file for ``python run.py TARGET FILE``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["zeroelastic", "zipfile", "json"]):
    import readers

_HOLDS_A_PICKLE = ("pickle", "checkpoint", "universal", "dcp")


def main() -> None:
    """Fuzz the target that the command line names."""
    name, corpus = sys.argv.pop(1), Path(sys.argv[1])
    target = readers.TARGETS[name]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would be the slowest part
    folder = Path(tempfile.mkdtemp(prefix="zeroelastic_fuzz_", dir=memory)) / "case"

    def one_input(data: bytes) -> None:
        readers.check(target, data, folder)

    def bend(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if not data or rng.random() < 0.3:
            return atheris.Mutate(data, most)
        return (data[:1] + readers.mutate_pickle(data[1:], rng))[:most]

    for number, data in enumerate(readers.seeds(name)):
        readers.check(target, data, folder, watch=False)  # imports whatever is imported on the way
        if corpus.is_dir():
            (corpus / f"seed{number:02d}").write_bytes(data)
    options = {"custom_mutator": bend} if name in _HOLDS_A_PICKLE else {}
    atheris.Setup(sys.argv, one_input, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
