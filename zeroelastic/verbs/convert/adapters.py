"""The names that PEFT gives the weights of an adapter in its own files, which it loads by ``from_pretrained``.

A parameter of PEFT has the adapter's name behind that of the tuner: ``q_proj.lora_A.default.weight``. In the file it
has not: ``q_proj.lora_A.weight``. A trained copy of a module loses ``modules_to_save`` as well. Source:
``get_peft_model_state_dict``, ``LoraModel._get_adapter_state_dict`` (DoRA) and ``save_pretrained`` (peft 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WEIGHTS_NAME = "adapter_model"
CONFIG_NAME = "adapter_config.json"
DEFAULT = "default"
"""The adapter whose files PEFT writes into the directory itself; those of others are in folders of their names."""

_OF_ADAPTER = re.compile(
    r"^(?P<module>.+)\.(?P<tuner>lora_\w+|ia3_l|hada_\w+|lokr_\w+|boft_\w+|oft_\w+|trainable_tokens_delta|modules_to_save)"
    r"\.(?P<adapter>[^./]+)(?P<rest>(\.[^/]+)?)$"
)


def adapters_of(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """By adapter: the name in its file of each trained parameter. Empty where no parameter is one of PEFT.

    A parameter that belongs to no adapter, such as a bias, is in the files of all, under its own name.
    """
    found: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    for name in names:
        match = _OF_ADAPTER.match(name)
        if match is None:
            others[name] = name
        else:
            found.setdefault(match["adapter"], {})[name] = _in_file(match)
    return {adapter: {**others, **own} for adapter, own in found.items()}


def in_trained_copies(names: Iterable[str], trained: Iterable[str]) -> set[str]:
    """Those of the names that are in a module's trained copy (``modules_to_save``), as are some of ``trained``.

    PEFT writes such a copy whole: with its buffers, as of a BatchNorm, and with what is frozen in it.
    """

    def copy_of(name: str) -> str | None:
        match = _OF_ADAPTER.match(name)
        return None if match is None or match["tuner"] != "modules_to_save" else name[: match.end("adapter")]

    copies = {copy_of(name) for name in trained} - {None}
    return {name for name in names if copy_of(name) in copies}


def _in_file(match: re.Match[str]) -> str:
    module, tuner, rest = match["module"], match["tuner"], match["rest"]
    if tuner == "modules_to_save":
        return module + rest
    return f"{module}.{tuner}" if tuner == "lora_magnitude_vector" else f"{module}.{tuner}{rest}"


def folder_of(adapter: str) -> str:
    """Where an adapter's files are, relative to the directory: with a slash at the end, or empty."""
    return "" if adapter == DEFAULT else f"{adapter}/"
