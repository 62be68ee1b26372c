"""The seams in DeepSpeed: the methods that install() wraps, how they are checked, and how they are put back.

Wrapped at class level, because HF Trainer, accelerate, Lightning and Fabric all end in these methods and bypass
anything else: ``DeepSpeedEngine._configure_zero_optimizer``, ``_configure_bf16_optimizer``, ``save_checkpoint``,
``load_checkpoint``, ``_get_all_ckpt_names``, ``DeepSpeedZeroOptimizer_Stage3.state_dict``, and ``load_state_dict`` of
the optimizers of all stages; and for saves that go on after they returned ``DeepSpeedEngine.save_16bit_model``,
``destroy`` and ``__del__``. Every wrapper passes anything that is not ours (``live.kinds``) to the original untouched.
``OpBuilder.jit_load`` says before it compiles an op.
"""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass
from importlib import import_module, metadata

from packaging.version import InvalidVersion, Version

from zeroelastic.deepspeed.patching import forget_frameworks, is_wrapped, unwrap_all, wrap, wrap_before_the_engine
from zeroelastic.errors import INSTALL_TRAIN, IncompatibleDeepSpeedError

MINIMUM_DEEPSPEED = "0.18"


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


def _seams(class_path: str, *signatures: str) -> tuple[Seam, ...]:
    """Seams of one class: each signature is the method's name and the parameters, without ``self``."""
    found = (signature.split() for signature in signatures)
    return tuple(Seam(class_path, method, ("self", *parameters)) for method, *parameters in found)


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_GROUPS = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
_BUILDER = "deepspeed.ops.op_builder.builder.OpBuilder"
_WRITERS = "deepspeed.runtime.checkpoint_engine"
_SWAP = "deepspeed.runtime.swap_tensor"
_LOAD = "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only custom_load_fn"

SEAMS = (
    *_seams(
        _ENGINE,
        "_configure_zero_optimizer optimizer",
        "_configure_bf16_optimizer optimizer",
        "save_checkpoint save_dir tag client_state save_latest exclude_frozen_parameters",
        f"load_checkpoint {_LOAD}",
        "_get_all_ckpt_names checkpoints_path tag",
        "save_16bit_model save_dir",
        "destroy",
        "__del__",
    ),
    *_seams(_STAGE3, "state_dict", "load_state_dict state_dict_list load_optimizer_states load_from_fp32_weights"),
    *_seams(_GROUPS, "load_state_dict state_dict_list"),
    *_seams(_BF16, "load_state_dict state_dict_list"),
    *_seams(_BUILDER, "jit_load verbose"),
)

USED = (
    *_seams(
        _ENGINE,
        f"_load_checkpoint {_LOAD}",
        "_get_zero_ckpt_name checkpoints_path tag",
        "_get_ckpt_name checkpoints_path tag",
        "zero_load_from_fp32_weights",
        "_copy_recovery_script save_path",
        "use_node_local_storage",
        "_get_param_fragment_func param",
        "zero_nvme_offload_optimizer",
        "_get_zero_frozen_param_attributes attr_func",
        "module_state_dict exclude_frozen_parameters",
        "_get_zero_param_shapes",
        "_get_shared_params",
        "_get_buffer_names",
    ),
    *_seams(
        _STAGE3,
        "_rigid_state_dict",
        "_reassign_or_swap_out_partitioned_parameters sub_group_id",
        "_unflatten_partitioned_parameters sub_group_id",
        "checkpoint_event_prologue",
        "checkpoint_event_epilogue",
        "get_param_id param",
        "_swappable_optimizer_subgroup sub_group_id",
        "reload_states",
    ),
    *(
        seam
        for optimizer in (_GROUPS, _BF16)
        for seam in _seams(optimizer, "state_dict", "_link_all_hp_params", "_lazy_init_hp_params_optimizer_state")
    ),
    *_seams(f"{_WRITERS}.torch_checkpoint_engine.TorchCheckpointEngine", "save state_dict path"),
    *_seams(f"{_SWAP}.optimizer_utils.OptimizerSwapper", "_io_aligned_numel numel"),
    *_seams(
        f"{_SWAP}.optimizer_utils.OptimizerStateSwapInfo",
        "add_state_tensors tensor_list",
        "release_unswapped_gradients",
    ),
    *_seams(f"{_SWAP}.pipelined_optimizer_swapper.PipelinedOptimizerSwapper", "_complete_swap_out swap_out_type"),
    *_seams(
        f"{_SWAP}.partitioned_param_swapper.AsyncPartitionedParameterSwapper",
        "get_path param must_exist",
        "synchronize_reads",
        "synchronize_writes",
    ),
)
"""Methods that are called but not wrapped; checked in the same way."""


_package = logging.getLogger("zeroelastic")
_level_before: int | None = None
_console = logging.StreamHandler()
"""Shows on stderr what rank 0 logs of loads and saves, as long as the job has set up no logging."""
_console.setFormatter(logging.Formatter("[zeroelastic] %(message)s"))
_console.addFilter(lambda record: not logging.getLogger().handlers)


def _show_on_stderr() -> None:
    global _level_before
    if _level_before is None:
        _level_before = _package.level
        _console.setStream(sys.stderr)
        _package.addHandler(_console)
        _package.setLevel(_level_before or logging.INFO)


def _hide_from_stderr() -> None:
    global _level_before
    if _level_before is not None:
        _package.removeHandler(_console)
        _package.setLevel(_level_before)
        _level_before = None


def is_installed() -> bool:
    """Whether the wrappers are in place."""
    engine = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and is_wrapped(engine.DeepSpeedEngine, "load_checkpoint")


def install() -> None:
    """Check every seam, then wrap; see ``zeroelastic.install``."""
    if not is_installed():
        classes = _check()
        _show_on_stderr()
        from zeroelastic.deepspeed import wrappers

        for seam in SEAMS:
            wrap(classes[seam.class_path], seam.method, getattr(wrappers, seam.method))
        logging.getLogger("DeepSpeed").addFilter(_drop_warning)
    wrap_before_the_engine()
    from zeroelastic.distributed.partners import announce

    announce()


def uninstall() -> None:
    """Put the originals back; see ``zeroelastic.uninstall``."""
    forget_frameworks()
    unwrap_all()
    logging.getLogger("DeepSpeed").removeFilter(_drop_warning)
    background = sys.modules.get("zeroelastic.deepspeed.save.background")
    try:
        if background is not None:
            background.finish_all()
    finally:
        partners = sys.modules.get("zeroelastic.distributed.partners")
        if partners is not None:
            partners.withdraw()
        _hide_from_stderr()


def _drop_warning(record: logging.LogRecord) -> bool:
    """Drops DeepSpeed's statement that ZeRO-3 elastic checkpoints are unsupported: not true while we are here."""
    return "ZeRO-3 elastic checkpointing is deprecated" not in record.getMessage()


def _check() -> dict[str, type]:
    """The classes of all seams. Raises IncompatibleDeepSpeedError, listing everything that does not fit."""
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed is not installed; zeroelastic.install() needs deepspeed>={MINIMUM_DEEPSPEED}. "
            f"Install it: {INSTALL_TRAIN}."
        ) from None
    try:
        too_old = Version(found) < Version(MINIMUM_DEEPSPEED)
    except InvalidVersion:
        too_old = False
    if too_old:
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed {found} is too old; zeroelastic needs deepspeed>={MINIMUM_DEEPSPEED}. Nothing was changed."
        )
    problems = [f"{seam.name} {problem}" for seam in (*SEAMS, *USED) if (problem := check_seam(seam))]
    if problems:
        listed = "; ".join(dict.fromkeys(problems))
        raise IncompatibleDeepSpeedError(
            f"DeepSpeed {found} differs from what zeroelastic knows: {listed}. Nothing was changed. Use a tested "
            "version (0.18.9, 0.19.5, 0.19.8) or upgrade zeroelastic."
        )
    return {path: owner for path in {seam.class_path for seam in SEAMS} if (owner := _class_at(path)) is not None}


def check_seam(seam: Seam) -> str:
    """Return how the installed DeepSpeed differs from a seam, or "". Raises what an import of the module raises."""
    try:
        owner = _class_at(seam.class_path)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("deepspeed."):
            raise  # something that DeepSpeed itself needs
        return f"does not exist (there is no {error.name})"
    if owner is None:
        return f"does not exist (there is no {seam.class_path})"
    method = owner.__dict__.get(seam.method)
    if not callable(method):
        return "does not exist"
    parameters = inspect.signature(method).parameters
    if {p.kind for p in parameters.values()} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return ""  # behind a decorator such as instrument_w_nvtx, which hides the signature
    missing = [parameter for parameter in seam.parameters if parameter not in parameters]
    return f"has no parameter {', '.join(missing)}" if missing else ""


def _class_at(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    found: type | None = getattr(import_module(module), name, None)
    return found
