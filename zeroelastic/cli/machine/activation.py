"""Whether ``ZEROELASTIC=1`` works here: the variable, and the .pth file that reads it."""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FILE = "zeroelastic.pth"
_VARIABLE = "ZEROELASTIC"
_SITE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Activation:
    """``files`` are the .pth files that a Python like this one reads; "on" means that this one has."""

    state: Literal["on", "off", "broken"]
    value: str | None
    files: tuple[str, ...]
    reason: str = ""


def describe_activation() -> Activation:
    """Look at the environment and at the folders in which Python looks for .pth files."""
    value = os.environ.get(_VARIABLE)
    folders = {*site.getsitepackages(), *(entry for entry in sys.path if Path(entry).name in _SITE_FOLDERS)}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    files = tuple(sorted(str(path) for folder in folders if (path := Path(folder) / _FILE).is_file()))
    if value in (None, "", "0"):
        return Activation("off", value, files)
    reason = ""
    if value != "1":
        reason = f"{_VARIABLE} is {value!r}; it can be 1 (on) or 0 (off). A job that imports DeepSpeed stops."
    elif not files:
        reason = (
            f"{_VARIABLE}=1 has no effect: no {_FILE} in {', '.join(sorted(folders))}. Install zeroelastic with pip, "
            "or start jobs by `python -m zeroelastic.run`."
        )
    elif not _has_begun():
        reason = f"{_VARIABLE}=1 has no effect in this Python, which has not read {files[0]}: leave out -S."
    return Activation("broken" if reason else "on", value, files, reason)


def _has_begun() -> bool:
    hook = sys.modules.get("_zeroelastic_hook")
    return hook is not None and bool(hook.is_waiting())
