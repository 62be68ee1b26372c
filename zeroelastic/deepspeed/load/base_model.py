"""The frozen weights of a run that loads a save without frozen weights, compared with the digests of that save."""

from __future__ import annotations

from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.deepspeed.live.digests import frozen_digests, gather_over_tp
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.errors import LayoutMismatchError, StrictError, counted, some

_LOAD_IT_FIRST = "Load the base model that the run was saved with before deepspeed.initialize"


def other_frozen(plan: LoadPlan) -> tuple[str, ...]:
    """Return the names of frozen parameters that differ from the save, which has only their digests. Collective.

    Raises LayoutMismatchError where the save was made with ``"frozen": "exclude"``, or the module is loaded strictly;
    StrictError under ``"strict": true``.
    """
    if not plan.keeps_frozen:
        return ()
    live, request, saved = plan.live, plan.request, plan.checkpoint.inventory
    recorded = {
        content.param.name: (content.param.shape, *content.tensors[FROZEN])
        for content in saved.excluded()
        if content.tp_rank == live.tp.rank
    }
    found = frozen_digests(live)
    own = [name for name in plan.diff.excluded if found[name] != recorded[name]]
    others = tuple(sorted({name for names in gather_over_tp(live, own) for name in names}))
    if not others:
        return ()
    what = f"{plan.tag_dir}: {_sentence(others, saved)}. {_LOAD_IT_FIRST}"
    advice = "load_module_strict=False keeps the run's own"
    if saved.excluded_by == "option":
        advice = 'save with "frozen": "include" to have frozen weights in the checkpoint'
    if saved.excluded_by == "option" or (request.strict_module and request.options.on_mismatch == "error"):
        shapes = {tensor.name: list(tensor.shape) for tensor in live.whole_frozen.whole_tensors}
        raise LayoutMismatchError(
            f"{what}; or {advice}:", [f"frozen parameter {name} {shapes.get(name, '')}" for name in others]
        )
    if request.options.strict:
        raise StrictError(f'{what}. Or set "strict": false in the "zeroelastic" block to go on all the same.')
    return others


def base_notes(plan: LoadPlan) -> list[str]:
    """Return a loud line where the run goes on with another base model than that of the save."""
    if not plan.other_frozen:
        return []
    saved = plan.checkpoint.inventory
    return [f"OTHER BASE MODEL: {_sentence(plan.other_frozen, saved)}, and stay the run's own. {_LOAD_IT_FIRST}"]


def _sentence(names: tuple[str, ...], saved: Inventory) -> str:
    return (
        f"{counted(len(names), 'frozen parameter')} of the run differ from those of the save by dtype, shape or digest "
        f"({some(names)}); the checkpoint has only their digests ({saved.excluded_how})"
    )
