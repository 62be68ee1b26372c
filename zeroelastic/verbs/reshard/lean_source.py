"""The module states of a lean tag, with what they leave out: as a save of everything would have written them.

Buffers come back as storages in the shared files. At stages 1 and 2 trained weights come back as tensors in the flat
buffers of the optimizer groups, where DeepSpeed has them; these storages are to be filled from the master weights.
Frozen parameters are not put back here: whatever is made of a checkpoint takes them from the saved state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zeroelastic.checkpoint.module_names import names_in_graph
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER
from zeroelastic.checkpoint.shared_weights import SHARED_KEY, SharedWeights
from zeroelastic.core.layout import Layout
from zeroelastic.errors import CheckpointError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.graph import Storage, new_storage, pairs_of, storage_of, tensor, with_pairs

_LEAN_OPTIONS = ("lean", "frozen")


class WeightPlace(NamedTuple):
    """Where a trained weight is to be made: its first element in a storage."""

    storage: Storage
    start: int


def beside_copy(shared: SharedWeights) -> SharedWeights:
    """The same for a copy of the tag that has the files of the run in a folder of its own run directory."""
    files = [
        file.model_copy(update={"path": f"../{FROZEN_FOLDER}/{file.name}"}) if file.is_of_run else file
        for file in shared.files
    ]
    return replace(shared, files=tuple(files))


def group_weights(layout: Layout, root: Mapping[object, object]) -> dict[str, WeightPlace]:
    """The place of each trained weight in the flat buffers of the ranks that saved at stages 1 and 2, by name.

    Dtype and device are those of the first weight of a group in the module's state ``root``, where it has no elements.
    """
    module = pairs_of(root.get("module"))
    storages: dict[int, Storage] = {}
    places: dict[str, WeightPlace] = {}
    for param, group, start in zip(layout.params, layout.sub_group.tolist(), layout.origin.tolist(), strict=True):
        if group not in storages:
            saved = storage_of(module.get(param.name))
            if saved is None:
                raise CheckpointError(f"the module's state has no entry for {param.name}. The file is damaged.")
            numel = int(layout.sub_group_numel[group]) * layout.world_size
            storages[group] = _like(saved, new_storage(saved.dtype, numel))
        places[param.name] = WeightPlace(storages[group], start)
    return places


def completed(
    root: Mapping[object, object],
    shared: SharedWeights,
    tag_dir: FilePath,
    layout: Layout,
    weights: Mapping[str, WeightPlace],
) -> dict[object, object]:
    """The module states ``root`` of a lean tag with its buffers, and with the trained ``weights`` of ``layout``."""
    tied = names_in_graph(root, is_whole=True).tied
    trained = {
        tied.get(param.name, param.name): (weights[param.name], param.shape)
        for param in layout.params
        if param.name in weights
    }

    def entry(name: object, value: object) -> object:
        if (buffer := shared.buffers.get(str(name))) is not None:
            storage = new_storage(buffer.dtype, math.prod(buffer.shape))
            storage.find = partial(shared.extent, buffer, tag_dir)
            return tensor(storage, 0, buffer.shape)
        if name not in shared.left_out or storage_of(value) is None:
            return value
        place = trained.get(tied.get(str(name), str(name)))
        return value if place is None else tensor(place[0].storage, place[0].start, place[1])

    saved_module = root.get("module")
    module = with_pairs(saved_module, ((name, entry(name, value)) for name, value in pairs_of(saved_module).items()))
    return not_lean({**{key: value for key, value in root.items() if key != SHARED_KEY}, "module": module})


def not_lean(root: Mapping[object, object]) -> dict[object, object]:
    """The root of a file whose configuration asks for lean saves, as one that does not ask for them has it."""
    config = pairs_of(root.get("ds_config"))
    own = config.get("zeroelastic")
    if not isinstance(own, dict):
        return dict(root)
    block = {key: value for key, value in own.items() if key not in _LEAN_OPTIONS}
    return {**root, "ds_config": {**config, "zeroelastic": block}}


def _like(saved: Storage, made: Storage) -> Storage:
    made.location = saved.location
    return made
