"""Whether the installed DeepSpeed is one that zeroelastic.install() accepts, seam by seam."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, util
from typing import TYPE_CHECKING, Literal

from zeroelastic.cli.machine.probe import Probe, ProbeFailed, describe_error

if TYPE_CHECKING:
    from zeroelastic.deepspeed.install.seams import Seam

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class CheckedSeam:
    """A method of DeepSpeed that zeroelastic relies on; ``problem`` is empty when it is as expected.

    The plain values of ``zeroelastic.deepspeed.install.seams.CheckedSeam``.
    """

    name: str
    use: Literal["wrapped", "called"]
    expected: tuple[str, ...]
    found: tuple[str, ...] | None
    problem: str


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The installed DeepSpeed; "usable" means that ``zeroelastic.install()`` succeeded."""

    state: Literal["usable", "not installed", "broken"]
    version: str | None
    seams: tuple[CheckedSeam, ...] = ()
    reason: str = ""
    remedy: str = ""


def check_deepspeed() -> DeepSpeed:
    """Import DeepSpeed, check every seam and install. Run by a Probe: the import takes seconds and prints."""
    import zeroelastic
    from zeroelastic.deepspeed.install.seams import MINIMUM_DEEPSPEED, SEAMS, USED
    from zeroelastic.extras import INSTALL_TRAIN

    version = installed_version("deepspeed")
    if version is None and util.find_spec("deepspeed") is None:
        reason = "it is needed to train and resume, not to look at checkpoints"
        remedy = f"To train, install it: {INSTALL_TRAIN}."
        return DeepSpeed("not installed", None, (), reason, remedy)
    try:
        import_module("deepspeed")
    except Exception as error:
        return _not_importable(version, describe_error(error))
    seams = (*(_check(seam, "wrapped") for seam in SEAMS), *(_check(seam, "called") for seam in USED))
    try:
        zeroelastic.install()
    except zeroelastic.IncompatibleDeepSpeedError as error:
        return DeepSpeed("broken", version, seams, str(error))
    except Exception as error:
        remedy = f"Use another DeepSpeed (>={MINIMUM_DEEPSPEED}) or upgrade zeroelastic."
        return DeepSpeed("broken", version, seams, f"zeroelastic.install() failed: {describe_error(error)}.", remedy)
    return DeepSpeed("usable", version, seams)


def deepspeed_answer(probe: Probe) -> DeepSpeed:
    """The answer of a Probe of ``check_deepspeed``; without one, DeepSpeed cannot be imported."""
    try:
        return probe.answer(DeepSpeed, limit_s=LIMIT_S)
    except ProbeFailed as failure:
        return _not_importable(installed_version("deepspeed"), str(failure))


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _not_importable(version: str | None, reason: str) -> DeepSpeed:
    remedy = "To see the whole error: python -c 'import deepspeed'."
    return DeepSpeed("broken", version, (), f"importing deepspeed failed: {reason}.", remedy)


def _check(seam: Seam, use: Literal["wrapped", "called"]) -> CheckedSeam:
    from zeroelastic.deepspeed.install.seams import check_seam

    try:
        checked = check_seam(seam)
    except Exception as error:
        module = seam.class_path.rpartition(".")[0]
        return CheckedSeam(
            seam.name, use, seam.parameters, None, f"{module} cannot be imported: {describe_error(error)}"
        )
    return CheckedSeam(seam.name, use, seam.parameters, checked.found, checked.problem)
