"""The whole weights of a module, which the model states file of stages 0 to 2 has and no file of stage 3.

A source of stage 1 or 2 has them as well: they are copied. From one of stage 3 they are made: trained weights by
rounding the master weights to the dtype of the run, as DeepSpeed does after every step, frozen ones from their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zeroelastic.checkpoint.optimizer_file import FP32
from zeroelastic.errors import UnsupportedError, some
from zeroelastic.executors.tables import cast_between
from zeroelastic.torch_file.pickle_graph import Node, Storage, entry, ordered_dict, pairs_of
from zeroelastic.verbs.reshard.source import ReshardSource

_MAX_LISTED = 4


def weight_dtypes(source: ReshardSource) -> dict[str, str]:
    """The dtype of each trained weight: that of its entry in the module's state, which may be without elements.

    For a weight without an entry it is the dtype that the saved configuration chooses.
    """
    module = pairs_of(source.model_root(0).get("module"))
    default = configured_dtype(source.config)
    storages = {param.name: _storage(module.get(param.name)) for param in source.trained.layout.params}
    return {name: default if storage is None else storage.dtype for name, storage in storages.items()}


def configured_dtype(config: Mapping[str, object]) -> str:
    """The dtype in which a run with a DeepSpeed configuration has its weights."""
    if entry(config, "bf16", "enabled"):
        return "bfloat16"
    return "float16" if entry(config, "fp16", "enabled") else "float32"


def made_weights(source: ReshardSource) -> dict[str, str]:
    """The dtypes of the weights that are made from master weights; none where the source has whole weights.

    Raises UnsupportedError for a dtype to which master weights cannot be rounded.
    """
    if source.whole_model:
        return {}
    dtypes = weight_dtypes(source)
    part = source.trained
    for param, saved in zip(part.layout.params, part.dtypes, strict=True):
        if cast_between(saved[FP32], dtypes[param.name]) is None:
            raise UnsupportedError(
                f"{param.name}: its master weights are {saved[FP32]}, its weights {dtypes[param.name]}, which cannot "
                "be made of them. Reshard to stage 3, with --stage 3."
            )
    return dtypes


def check_entries(source: ReshardSource, names: Iterable[str]) -> None:
    """Raise UnsupportedError where the module's state has no place for the weight of one of these parameters."""
    root = source.model_root(0)
    module, shared = pairs_of(root.get("module")), pairs_of(root.get("shared_params"))
    found = {*module, *(shared.get(name, name) for name in module)}
    missing = sorted(name for name in names if name not in found and shared.get(name, name) not in found)
    if missing:
        raise UnsupportedError(
            f"the module's state has no entry for {some(missing, _MAX_LISTED)}, which stage 0 keeps there alone. "
            "Reshard to stage 3, with --stage 3."
        )


def check_module(source: ReshardSource) -> None:
    """Raise UnsupportedError where a whole module would not say which of its tensors are frozen parameters.

    At stages 1 and 2 these are its tensors that are neither trained, nor buffers, nor tied to another parameter.
    """
    root = source.model_root(0)
    others = {param.name for param in source.trained.layout.params} | {*pairs_of(root.get("shared_params"))}
    buffers = root.get("buffer_names")
    others |= set(buffers) if isinstance(buffers, list) else set()
    module = pairs_of(root.get("module"))
    found = {str(name) for name, value in module.items() if name not in others and _storage(value) is not None}
    frozen = set() if source.frozen is None else {param.name for param in source.frozen.layout.params}
    if frozen - found:
        raise UnsupportedError(
            f"the module's state has no entry for {some(sorted(frozen - found), _MAX_LISTED)}, frozen parameters, "
            "which stages 1 and 2 keep there. Reshard to stage 3, with --stage 3."
        )
    if found - frozen:
        raise UnsupportedError(
            f"the module's state has {some(sorted(found - frozen), _MAX_LISTED)}, neither parameters nor buffers, "
            "which files of stages 1 and 2 do not tell from frozen parameters. Reshard to stage 3, with --stage 3."
        )


def whole_module(root: Mapping[object, object], whole: Mapping[str, Node]) -> Node:
    """The module's state with these whole weights; what is tied to one of them is the same tensor.

    Every other entry stays as it is.
    """
    shared = pairs_of(root.get("shared_params"))
    tied = {shared.get(name, name): value for name, value in whole.items()}

    def weight(name: object, value: object) -> object:
        return whole.get(str(name), tied.get(shared.get(name, name), value))

    return ordered_dict((name, weight(name, value)) for name, value in pairs_of(root.get("module")).items())


def _storage(value: object) -> Storage | None:
    """The storage of a tensor; None for another object."""
    storage = value.args[0] if isinstance(value, Node) and value.args else None
    return storage if isinstance(storage, Storage) else None
