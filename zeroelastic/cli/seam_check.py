"""Whether the installed DeepSpeed is one that zeroelastic.install() accepts, seam by seam."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Literal

from zeroelastic.cli.probe import Probe, ProbeFailed, describe_error

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class CheckedSeam:
    """A method of DeepSpeed that is relied on; ``problem`` is empty when it is as expected.

    ``found`` are its parameters, None when there is no such method. Behind a decorator that takes anything they are
    not visible, and "*args, **kwargs" is accepted.
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
    seams: tuple[CheckedSeam, ...]
    reason: str
    remedy: str


def check_deepspeed() -> DeepSpeed:
    """Import DeepSpeed, look at every seam and install. Run by a Probe: the import takes seconds and prints."""
    import zeroelastic
    from zeroelastic.stage3.seams import MINIMUM_DEEPSPEED, SEAMS, USED

    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        version = None
        if util.find_spec("deepspeed") is None:
            reason = "it is needed to train and resume, not to look at checkpoints"
            remedy = f"To train, install it: pip install 'deepspeed>={MINIMUM_DEEPSPEED}'."
            return DeepSpeed("not installed", None, (), reason, remedy)
    try:
        import_module("deepspeed")
    except Exception as error:
        return _not_importable(version, describe_error(error))
    seams = (
        *(_check_seam("wrapped", seam.class_path, seam.method, seam.parameters) for seam in SEAMS),
        *(_check_seam("called", seam.class_path, seam.method, seam.parameters) for seam in USED),
    )
    try:
        zeroelastic.install()
    except zeroelastic.IncompatibleDeepSpeedError as error:
        return DeepSpeed("broken", version, seams, str(error), "")
    except Exception as error:
        remedy = f"Use another DeepSpeed (>={MINIMUM_DEEPSPEED}) or upgrade zeroelastic."
        return DeepSpeed("broken", version, seams, f"zeroelastic.install() failed: {describe_error(error)}.", remedy)
    return DeepSpeed("usable", version, seams, "", "")


def deepspeed_answer(probe: Probe) -> DeepSpeed:
    """The answer of a Probe of ``check_deepspeed``, or what it means that there is none."""
    try:
        return probe.answer(DeepSpeed, limit_s=LIMIT_S)
    except ProbeFailed as failure:
        try:
            version = metadata.version("deepspeed")
        except metadata.PackageNotFoundError:
            version = None
        return _not_importable(version, str(failure))


def _not_importable(version: str | None, reason: str) -> DeepSpeed:
    remedy = "To see the whole of it: python -c 'import deepspeed'."
    return DeepSpeed("broken", version, (), f"importing deepspeed failed: {reason}.", remedy)


def _check_seam(
    use: Literal["wrapped", "called"], class_path: str, method: str, expected: tuple[str, ...]
) -> CheckedSeam:
    """As install() checks it, one seam at a time."""
    module, _, class_name = class_path.rpartition(".")
    name = f"{class_name}.{method}"
    try:
        owner = getattr(import_module(module), class_name, None)
    except Exception as error:
        return CheckedSeam(name, use, expected, None, f"{module} cannot be imported: {describe_error(error)}")
    if owner is None:
        return CheckedSeam(name, use, expected, None, f"{class_path} does not exist")
    function = vars(owner).get(method)
    if not callable(function):
        return CheckedSeam(name, use, expected, None, "does not exist")
    parameters = inspect.signature(function).parameters
    if {p.kind for p in parameters.values()} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return CheckedSeam(name, use, expected, ("*args", "**kwargs"), "")
    missing = [parameter for parameter in expected if parameter not in parameters]
    problem = f"has no parameter {', '.join(missing)}" if missing else ""
    return CheckedSeam(name, use, expected, tuple(parameters), problem)
