"""install() and uninstall(): what they change, what they put back, and what they refuse."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from programs import launched, run_python
from saved_files import record_of
from training import Job, build_engine, ds_config, raised, train_step

from zeroelastic.testing import RankPool


@pytest.mark.core
def test_uninstall_restores_every_attribute(rank_pool: RankPool) -> None:
    assert rank_pool.run(install_twice_and_uninstall, 1) == [[]]


def install_twice_and_uninstall() -> list[str]:
    """Names of class attributes that are not the very objects they were."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    import zeroelastic

    classes = (DeepSpeedEngine, DeepSpeedZeroOptimizer_Stage3, OpBuilder)
    before = [dict(vars(owner)) for owner in classes]

    def signatures() -> list[inspect.Signature]:
        return [inspect.signature(getattr(DeepSpeedEngine, name)) for name in ("save_checkpoint", "load_checkpoint")]

    stock = signatures()
    zeroelastic.install()
    assert zeroelastic.is_installed()
    assert signatures() == stock  # HF Trainer looks at the parameters before it passes exclude_frozen_parameters
    pairs = list(zip(classes, before, strict=True))
    changed = {name for owner, old in pairs for name in old if vars(owner)[name] is not old[name]}
    assert changed == {
        "__del__",
        "_configure_bf16_optimizer",
        "_configure_zero_optimizer",
        "_get_all_ckpt_names",
        "destroy",
        "jit_load",
        "load_checkpoint",
        "load_state_dict",
        "save_16bit_model",
        "save_checkpoint",
        "state_dict",
    }
    once = [dict(vars(owner)) for owner in classes]
    zeroelastic.install()
    assert [dict(vars(owner)) for owner in classes] == once, "a second install() wrapped again"
    zeroelastic.uninstall()
    zeroelastic.uninstall()
    assert not zeroelastic.is_installed()
    after = [dict(vars(owner)) for owner in classes]
    return [
        name
        for old, new in zip(before, after, strict=True)
        for name in old.keys() | new.keys()
        if old.get(name) is not new.get(name)
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_holds_up_the_first_use_of_an_op_is_said_on_one_rank_of_a_node(tmp_path: Path, compiled: bool) -> None:
    """The compiler takes minutes without a word, and a lock that a killed build left has no end."""
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    if compiled:
        (folder / "cpu_adam.so").touch()
    else:
        (folder / "lock").touch()
    said = []
    for rank in "01":
        done = run_python("-c", USES_AN_OP, TORCH_EXTENSIONS_DIR=str(tmp_path), LOCAL_RANK=rank)
        assert done.returncode == 0, done.stderr
        said.append([line for line in done.stderr.splitlines() if "[zeroelastic]" in line])
    compiles = "[zeroelastic] DeepSpeed compiles its op cpu_adam, once on this machine: that takes a minute or two"
    waits = (
        f"[zeroelastic] {folder}/lock: was left by a build that was killed, and builds there wait forever. If no other "
        f"machine or user builds there, remove it: rm {folder}/lock"
    )
    assert said == [[] if compiled else [compiles, waits], []]


USES_AN_OP = """
from deepspeed.ops.op_builder.builder import OpBuilder
OpBuilder.jit_load = lambda self, verbose=True: "the op"

import zeroelastic
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
zeroelastic.install()
assert CPUAdamBuilder().jit_load(verbose=False) == "the op"
"""


def save_with_overrides(directory: str) -> list[bool]:
    """Whether what somebody has put on the engine and its optimizer is there after a save, and nothing else is."""
    from training import Job, build_engine

    engine = build_engine(Job())
    engine._get_param_fragment_func = functools.partial(type(engine)._get_param_fragment_func, engine)
    engine.zero_nvme_offload_optimizer = lambda: False
    engine._copy_recovery_script = functools.partial(type(engine)._copy_recovery_script, engine)
    engine.optimizer.checkpoint_event_epilogue = functools.partial(
        type(engine.optimizer).checkpoint_event_epilogue, engine.optimizer
    )
    before = [dict(vars(engine)), dict(vars(engine.optimizer))]
    engine.save_checkpoint(directory)
    after = [vars(engine), vars(engine.optimizer)]
    return [
        {name: id(value) for name, value in then.items() if callable(value)}
        == {name: id(value) for name, value in now.items() if callable(value)}
        for then, now in zip(before, after, strict=True)
    ]


def test_a_save_leaves_the_engines_own_attributes_as_they_were(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(save_with_overrides, 1, str(tmp_path)) == [[True, True]]


CHANGED_SEAMS = {
    "missing": "DeepSpeedEngine._get_all_ckpt_names does not exist",
    "parameter": "DeepSpeedEngine.load_checkpoint has no parameter load_module_strict",
    "class": "TorchCheckpointEngine.save does not exist (there is no deepspeed.runtime.checkpoint_engine.torch_",
    "module": "TorchCheckpointEngine.save does not exist (there is no deepspeed.runtime.checkpoint_engine.torch_",
}


@pytest.mark.core
@pytest.mark.support("Using it", "DeepSpeed below 0.18", "refused", "by `install()`, which changes nothing")
@pytest.mark.support(
    "Using it", "a DeepSpeed whose seams have changed", "refused", "by `install()`, naming the seam; nothing is changed"
)
def test_a_deepspeed_that_is_too_old_or_has_changed_is_refused_by_name_and_nothing_is_wrapped(
    rank_pool: RankPool,
) -> None:
    (found,) = rank_pool.run(install_on_each, 1)
    assert "0.16.9" in found["version"] and "deepspeed>=0.18" in found["version"]
    for change, named in CHANGED_SEAMS.items():
        assert named in found[change] and "Nothing was changed" in found[change]


def install_on_each() -> dict[str, str]:
    """What install() says of each DeepSpeed."""
    from importlib import metadata

    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine
    from deepspeed.runtime.engine import DeepSpeedEngine

    import zeroelastic

    found: dict[str, str] = {}
    for change in ("version", *CHANGED_SEAMS):
        with pytest.MonkeyPatch.context() as patch:
            if change == "version":
                patch.setattr(metadata, "version", lambda name: "0.16.9")
            elif change == "missing":
                patch.delattr(DeepSpeedEngine, "_get_all_ckpt_names")
            elif change == "parameter":
                patch.setattr(DeepSpeedEngine, "load_checkpoint", lambda self, load_dir, tag=None: None)
            elif change == "class":
                patch.delattr(torch_checkpoint_engine, "TorchCheckpointEngine")
            else:
                patch.setitem(sys.modules, torch_checkpoint_engine.__name__, None)  # as if it were not there
            before = dict(vars(DeepSpeedEngine))
            with pytest.raises(zeroelastic.IncompatibleDeepSpeedError) as caught:
                zeroelastic.install()
            assert dict(vars(DeepSpeedEngine)) == before and not zeroelastic.is_installed()
            found[change] = str(caught.value)
    return found


@pytest.mark.support(
    "Using it", '`"zeroelastic": {"format": "elastic"}`', "exact", "also where DeepSpeed refuses its key"
)
def test_our_option_asks_for_elastic_saves_where_deepspeed_has_no_key_for_them(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (refused, *formats), _ = rank_pool.run(save_with_a_later_deepspeed, 2, str(tmp_path))
    assert "elastic_checkpoint" in refused and "not permitted" in refused
    assert formats == ["elastic", "rigid"]


def save_with_a_later_deepspeed(directory: str) -> list[str]:
    """What a DeepSpeed without the key says to it, and the formats of saves with our option and without."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    del DeepSpeedZeroConfig.model_fields["elastic_checkpoint"]
    DeepSpeedZeroConfig.model_rebuild(force=True)
    DeepSpeedZeroConfig.elastic_checkpoint = False  # which this version still reads
    found = [raised(lambda: DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True))[1]]
    for number, options in enumerate(({"format": "elastic"}, {"verify": True})):
        job = Job(options=options)
        config = ds_config(job)
        del config["zero_optimization"]["elastic_checkpoint"]
        engine = build_engine(job, config)
        train_step(engine, 0)
        engine.save_checkpoint(directory, tag=f"tag{number}")
        found.append(record_of(Path(directory) / f"tag{number}").checkpoint_format)
    return found


SCRIPT = """
import sys
import zeroelastic
assert zeroelastic.is_installed()
from torch.distributed import distributed_c10d
assert distributed_c10d.default_pg_timeout.total_seconds() == 600
print("ran", sys.argv[1:], __name__, sys.path[0], file=open(sys.argv[1], "w"))
"""


@pytest.mark.support(
    "Using it", "`python -m zeroelastic.run`, scripts unchanged", "exact", "under `torchrun`, scripts and modules"
)
@pytest.mark.quick
def test_launcher_runs_an_unchanged_script_or_module(rank_pool: RankPool, tmp_path: Path) -> None:
    """The script by a new interpreter, as a user starts it, and the module in the process of a rank."""
    (tmp_path / "train_it.py").write_text(SCRIPT)
    arguments = [str(tmp_path / "out"), "--lr", "3"]
    command = [sys.executable, "-m", "zeroelastic.run", str(tmp_path / "train_it.py"), *arguments]
    subprocess.run(command, check=True, timeout=120)
    texts = [(tmp_path / "out").read_text()]
    (tmp_path / "out").unlink()
    (done,) = rank_pool.run(launched, 1, ["-m", "train_it", *arguments], {}, tmp_path)
    assert done.returncode == 0, done.stderr
    texts.append((tmp_path / "out").read_text())
    for text in texts:
        assert "'--lr', '3'] __main__" in text and str(tmp_path) in text


def test_launcher_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zeroelastic.run", str(tmp_path / "none.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and "no such script" in result.stderr
