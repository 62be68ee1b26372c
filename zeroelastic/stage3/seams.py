"""The seams in DeepSpeed: the methods that install() wraps, how they are checked, and how they are put back.

Wrapped at class level, because HF Trainer, accelerate, Lightning and Fabric all end in these methods and bypass
anything else: ``DeepSpeedEngine._configure_zero_optimizer``, ``save_checkpoint``, ``load_checkpoint``,
``_get_all_ckpt_names``, and ``DeepSpeedZeroOptimizer_Stage3.state_dict``, ``load_state_dict``; and for saves that go on
after they returned ``DeepSpeedEngine._commit_decoupled_checkpoint``, ``save_16bit_model``, ``destroy`` and ``__del__``.
Every wrapper passes anything that is not ZeRO stage 3 to the original untouched.
"""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass
from importlib import import_module, metadata

from packaging.version import InvalidVersion, Version

from zeroelastic.build_locks import watch_locks
from zeroelastic.errors import IncompatibleDeepSpeedError
from zeroelastic.notices import hide_notices, show_notices
from zeroelastic.patching import is_wrapped, unwrap_all, wrap

MINIMUM_DEEPSPEED = "0.18"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seam:
    """A method that is wrapped: its class, its name, and the parameters that the wrapper relies on."""

    class_path: str
    method: str
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        """Class and method, for messages."""
        return f"{self.class_path.rpartition('.')[2]}.{self.method}"


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_TORCH_ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine"
_DECOUPLED_ENGINE = "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine.DecoupledCheckpointEngine"
_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_SWAPPER = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper"
_SWAP_INFO = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerStateSwapInfo"
_PIPELINED = "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper.PipelinedOptimizerSwapper"
_PARAM_SWAPPER = "deepspeed.runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper"

SEAMS = (
    Seam(_ENGINE, "_configure_zero_optimizer", ("self", "optimizer")),
    Seam(
        _ENGINE,
        "save_checkpoint",
        ("self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
    ),
    Seam(
        _ENGINE,
        "load_checkpoint",
        (
            "self",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
            "custom_load_fn",
        ),
    ),
    Seam(_ENGINE, "_get_all_ckpt_names", ("self", "checkpoints_path", "tag")),
    Seam(_ENGINE, "_commit_decoupled_checkpoint", ("self",)),
    Seam(_ENGINE, "save_16bit_model", ("self", "save_dir")),
    Seam(_ENGINE, "destroy", ("self",)),
    Seam(_ENGINE, "__del__", ("self",)),
    Seam(_STAGE3, "state_dict", ("self",)),
    Seam(
        _STAGE3,
        "load_state_dict",
        ("self", "state_dict_list", "load_optimizer_states", "load_from_fp32_weights"),
    ),
)

USED = (
    Seam(
        _ENGINE,
        "_load_checkpoint",
        (
            "self",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
            "custom_load_fn",
        ),
    ),
    Seam(_ENGINE, "_get_zero_ckpt_name", ("self", "checkpoints_path", "tag")),
    Seam(_ENGINE, "_get_ckpt_name", ("self", "checkpoints_path", "tag")),
    Seam(_ENGINE, "zero_load_from_fp32_weights", ("self",)),
    Seam(_ENGINE, "_copy_recovery_script", ("self", "save_path")),
    Seam(_ENGINE, "use_node_local_storage", ("self",)),
    Seam(_STAGE3, "_rigid_state_dict", ("self",)),
    Seam(_STAGE3, "_reassign_or_swap_out_partitioned_parameters", ("self", "sub_group_id")),
    Seam(_STAGE3, "checkpoint_event_prologue", ("self",)),
    Seam(_STAGE3, "checkpoint_event_epilogue", ("self",)),
    Seam(_STAGE3, "get_param_id", ("self", "param")),
    Seam(_TORCH_ENGINE, "save", ("self", "state_dict", "path")),
    Seam(_ENGINE, "_get_param_fragment_func", ("self", "param")),
    Seam(_ENGINE, "zero_nvme_offload_optimizer", ("self",)),
    Seam(_ENGINE, "_get_zero_frozen_param_attributes", ("self", "attr_func")),
    Seam(_ENGINE, "module_state_dict", ("self", "exclude_frozen_parameters")),
    Seam(_ENGINE, "_get_zero_param_shapes", ("self",)),
    Seam(_ENGINE, "_get_buffer_names", ("self",)),
    Seam(_STAGE3, "_swappable_optimizer_subgroup", ("self", "sub_group_id")),
    Seam(_STAGE3, "reload_states", ("self",)),
    Seam(_SWAPPER, "_io_aligned_numel", ("self", "numel")),
    Seam(_SWAP_INFO, "add_state_tensors", ("self", "tensor_list")),
    Seam(_SWAP_INFO, "release_unswapped_gradients", ("self",)),
    Seam(_PIPELINED, "_complete_swap_out", ("self", "swap_out_type")),
    Seam(_PARAM_SWAPPER, "get_path", ("self", "param", "must_exist")),
    Seam(_PARAM_SWAPPER, "synchronize_reads", ("self",)),
    Seam(_PARAM_SWAPPER, "synchronize_writes", ("self",)),
    Seam(_DECOUPLED_ENGINE, "commit", ("self", "info")),
)
"""Methods that are called but not wrapped; checked in the same way."""


@dataclass(frozen=True, slots=True)
class CheckedSeam:
    """A seam as the installed DeepSpeed has it; ``problem``, said of the method, is empty when it is as expected.

    ``found`` are the method's parameters, None when there is no such method. Behind a decorator that takes anything
    they are not visible, and "*args, **kwargs" is accepted.
    """

    seam: Seam
    owner: type | None
    found: tuple[str, ...] | None
    problem: str


def is_installed() -> bool:
    """Whether the wrappers are in place."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and is_wrapped(engine.DeepSpeedEngine, "load_checkpoint")


def install() -> None:
    """Check every seam, then wrap; see ``zeroelastic.install``."""
    if not is_installed():
        classes = _check()
        show_notices()
        from zeroelastic.stage3.wrappers import REPLACEMENTS

        for seam in SEAMS:
            wrap(classes[seam.class_path], seam.method, REPLACEMENTS[seam.method])
        watch_locks()
        logging.getLogger("DeepSpeed").addFilter(_DROP_WARNING)
    from zeroelastic.stage3.partners import announce

    announce()


def uninstall() -> None:
    """Put the originals back; see ``zeroelastic.uninstall``."""
    unwrap_all()
    logging.getLogger("DeepSpeed").removeFilter(_DROP_WARNING)
    background = sys.modules.get("zeroelastic.stage3.background")
    try:
        if background is not None:
            background.finish_all()
    finally:
        partners = sys.modules.get("zeroelastic.stage3.partners")
        if partners is not None:
            partners.withdraw()
        hide_notices()


class _DropElasticWarning(logging.Filter):
    """Drops DeepSpeed's statement that ZeRO-3 elastic checkpoints are unsupported: not true while we are here."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "ZeRO-3 elastic checkpointing is deprecated" not in record.getMessage()


_DROP_WARNING = _DropElasticWarning()


def _check() -> dict[str, type]:
    """The classes of all seams. Raises IncompatibleDeepSpeedError, listing everything that does not fit."""
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed is not installed; zeroelastic.install() needs deepspeed>={MINIMUM_DEEPSPEED}."
        ) from None
    try:
        too_old = Version(found) < Version(MINIMUM_DEEPSPEED)
    except InvalidVersion:
        too_old = False
    if too_old:
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed {found} is too old; zeroelastic needs deepspeed>={MINIMUM_DEEPSPEED}. Nothing was changed."
        )
    checked = [check_seam(seam) for seam in (*SEAMS, *USED)]
    problems = [f"{one.seam.name} {one.problem}" for one in checked if one.problem]
    if problems:
        listed = "; ".join(dict.fromkeys(problems))
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed {found} differs from what zeroelastic knows: {listed}. Nothing was changed. Use a tested "
            "version (0.18.9, 0.19.5, 0.19.8) or upgrade zeroelastic."
        )
    return {one.seam.class_path: one.owner for one in checked if one.owner is not None}


def check_seam(seam: Seam) -> CheckedSeam:
    """Look at one seam of the installed DeepSpeed; imports its module, and raises what that import raises."""
    module, _, name = seam.class_path.rpartition(".")
    try:
        owner = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("deepspeed."):
            raise  # something that DeepSpeed itself needs
        return CheckedSeam(seam, None, None, f"does not exist (there is no {error.name})")
    if owner is None:
        return CheckedSeam(seam, None, None, f"does not exist (there is no {seam.class_path})")
    method = owner.__dict__.get(seam.method)
    if not callable(method):
        return CheckedSeam(seam, owner, None, "does not exist")
    parameters = inspect.signature(method).parameters
    if {p.kind for p in parameters.values()} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        # behind a decorator such as instrument_w_nvtx, which hides the signature
        return CheckedSeam(seam, owner, ("*args", "**kwargs"), "")
    missing = [parameter for parameter in seam.parameters if parameter not in parameters]
    problem = f"has no parameter {', '.join(missing)}" if missing else ""
    return CheckedSeam(seam, owner, tuple(parameters), problem)
