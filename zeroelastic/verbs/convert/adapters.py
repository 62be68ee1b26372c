"""The names that PEFT gives the weights of an adapter in its own files, which it loads by ``from_pretrained``.

A parameter of PEFT has the adapter's name behind that of the tuner: ``q_proj.lora_A.default.weight``. In the file it
has not: ``q_proj.lora_A.weight``. A trained copy of a module loses ``modules_to_save`` as well, and the embedding of a
prompt is ``prompt_embeddings``. Source: ``get_peft_model_state_dict``, ``_get_adapter_state_dict`` of the tuners (DoRA,
VeRA) and ``save_pretrained`` (peft 0.19).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from zeroelastic.errors import UnsupportedError, printable

WEIGHTS_NAME = "adapter_model"
CONFIG_NAME = "adapter_config.json"
DEFAULT = "default"
"""The adapter whose files PEFT writes into the directory itself; those of others are in folders of their names."""

_TUNERS = (
    *("lora", "ia3", "hada", "lokr", "boft", "oft", "vera", "ln_tuning", "fourierft", "miss", "hra", "randlora", "c3a"),
    *("road", "gralora", "waveft", "osf", "delora"),
)
"""The methods of PEFT whose files have what the model has, under these names."""

_OTHER_TUNERS = (
    *("vblora", "shira", "pvera", "frod", "tinylora", "unilora", "supertuning", "deft", "glora", "poly", "adamss"),
    *("peanut", "hira", "psoft", "beft", "shadow", "lily", "bone"),
)
"""The methods whose files have something else as well, or may have."""


def _of(tuners: str) -> re.Pattern[str]:
    return re.compile(rf"^(?P<module>.+)\.(?P<tuner>{tuners})\.(?P<adapter>[^./]+)(?P<rest>(\.[^/]+)?)$")


_OF_ADAPTER = _of(rf"(?:{'|'.join(_TUNERS)})_\w+|trainable_tokens_delta|modules_to_save")
_OF_OTHER = _of(rf"(?:{'|'.join(_OTHER_TUNERS)})_\w+")
_OF_PROMPT = re.compile(r"^prompt_encoder\.(?P<adapter>[^./]+)\.(?P<rest>[^/]+)$")
_ADAPTION_PROMPT = re.compile(r"\.adaption_(gate|prompt)$")
"""Parameters of an adaption prompt do not have the adapter's name."""

_PROJECTIONS = ("vera_A", "vera_B")
"""Of VeRA: every layer has these of the model."""

_EMBEDDINGS = ("embed_tokens", "lm_head")
"""Modules that PEFT saves with their base weights if they have an adapter (``EMBEDDING_LAYER_NAMES``)."""


def adapters_of(trained: Iterable[str], others: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """By adapter: the name in its file of each parameter, and buffer, of it. Empty where none is one of PEFT.

    An adapter has a trained parameter, and what there is of it among ``others``, the parameters that are frozen and
    the buffers. A trained parameter that belongs to no adapter, such as a bias, is in the files of all, under its own
    name. Raises UnsupportedError for methods of PEFT whose files are not known, and where a part of an adapter is
    lacking.
    """
    found: dict[str, dict[str, str]] = {}
    of_none: dict[str, str] = {}
    for name in trained:
        place = _place(name)
        if place is None:
            of_none[name] = name
        else:
            found.setdefault(place[0], {})[name] = place[1]
    for name in others:
        match = _OF_ADAPTER.match(name)
        if match is not None and match["adapter"] in found and (in_file := _in_file(match)):
            found[match["adapter"]][name] = in_file
    for adapter, own in found.items():
        base = base_weights(own)
        own.update({name: name for name in others if name in base})
        _require_pairs(adapter, own.values())
    return {adapter: {**of_none, **own} for adapter, own in found.items()}


def base_weights(names: Iterable[str]) -> set[str]:
    """The base weights that PEFT saves with an adapter of these parameters: of embeddings alone."""
    modules = {match["module"] for name in names if (match := _OF_ADAPTER.match(name)) and _is_tuner(match)}
    return {f"{module}.base_layer.weight" for module in modules if module.rpartition(".")[2] in _EMBEDDINGS}


def _place(name: str) -> tuple[str, str] | None:
    """The adapter that a trained parameter belongs to, and its name in the file."""
    other = _OF_OTHER.match(name)
    if other is not None:
        raise _unknown(name, f"{other['tuner'].partition('_')[0]} of PEFT, whose files have more than the weights")
    prompt = _OF_PROMPT.match(name)
    if prompt is not None:
        if prompt["rest"] != "embedding.weight":
            raise _unknown(name, "a prompt that a network computes, and PEFT's file has what it gives")
        return prompt["adapter"], "prompt_embeddings"
    if _ADAPTION_PROMPT.search(name):
        return DEFAULT, name
    match = _OF_ADAPTER.match(name)
    return None if match is None else (match["adapter"], _in_file(match))


def _unknown(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{printable(name)} belongs to {what}. Write this adapter by save_pretrained of PEFT, in the script; without "
        "--adapters, export writes the whole model."
    )


def _require_pairs(adapter: str, names: Collection[str]) -> None:
    """Raise UnsupportedError where one of the two matrices of a LoRA is lacking, as a frozen one that was not saved."""
    for name in names:
        other = re.sub(r"\.lora_(embedding_)?(A|B)\b", lambda m: f".lora_{m[1] or ''}{'BA'['AB'.index(m[2])]}", name)
        if other not in names and not name.endswith(".bias"):
            raise UnsupportedError(
                f"adapter {printable(adapter)} has {printable(name)} without {printable(other)}: the checkpoint was "
                "saved without frozen weights. Write this adapter by save_pretrained of PEFT, in the script."
            )


def _is_tuner(match: re.Match[str]) -> bool:
    return match["tuner"] not in ("modules_to_save", "trainable_tokens_delta")


def _in_file(match: re.Match[str]) -> str:
    """The name in the file: empty if it is not there."""
    module, tuner, rest = match["module"], match["tuner"], match["rest"]
    if tuner == "modules_to_save":
        return module + rest
    if tuner in _PROJECTIONS and module != "base_model":
        return ""
    return f"{module}.{tuner}" if tuner == "lora_magnitude_vector" else f"{module}.{tuner}{rest}"


def folder_of(adapter: str) -> str:
    """Where an adapter's files are, relative to the directory: with a slash at the end, or empty."""
    return "" if adapter == DEFAULT else f"{adapter}/"
