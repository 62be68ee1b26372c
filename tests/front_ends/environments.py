"""Makes the environments of front ends beside the development environment: ``python environments.py DIR NAME ...``.

Each has the pinned packages of ``requirements/NAME.txt``, installed without their dependencies, before the packages of
the environment that this runs in; zeroelastic from this checkout; and the .pth file as an installed zeroelastic has it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from zeroelastic import activation

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
    "deepspeed": "deepspeed.launcher.runner",
}
"""Programs of packages that the environment shares: by its own Python."""


def make(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "repository.pth").write_text(f"{ROOT}\n")
    (site / activation.FILE).write_text(activation.LINE)
    for program, module in PROGRAMS.items():
        path = folder / "bin" / program
        path.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        path.chmod(0o755)
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pins = HERE / "requirements" / f"{folder.name}.txt"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install, "-r", pins], check=True)
    (folder / ".stamp").touch()


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(Path(sys.argv[1]).absolute() / name)
