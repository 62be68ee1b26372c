"""Optimizer files: elastic and rigid files say the same, and whatever contradicts itself is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import ADAM, GROUPS, edit_optim, gather, optim_name, write_checkpoint

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, OptimizerHeader
from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Param, layout_from_sub_groups, pack_sub_groups
from zeroelastic.errors import CheckpointError, UnsupportedError, ZeroElasticError

SIZES = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), max_size=4), min_size=1, max_size=3).filter(
    lambda groups: any(numel for group in groups for numel in group)
)


def sub_groups_of(world_size: int, groups=GROUPS, sub_group_size=10):
    return pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)


def opened(tag_dir: Path, rank: int = 0, world_size: int = 2) -> OptimizerHeader:
    file = read_optimizer_file(tag_dir / optim_name(rank), world_size=world_size)
    return file.header(rank, params=sub_groups_of(world_size))


@given(
    sizes=SIZES,
    world_size=st.integers(1, 9),
    sub_group_size=st.one_of(st.none(), st.integers(1, 40)),
    format=st.sampled_from(["elastic", "rigid"]),
    master=st.sampled_from([torch.float32, torch.bfloat16]),
    states=st.dictionaries(
        st.sampled_from(["exp_avg", "exp_avg_sq", "momentum_buffer"]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8]),
        max_size=3,
    ),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_model_on_any_world_size(tmp_path_factory, sizes, world_size, sub_group_size, format, master, states):
    tag_dir = tmp_path_factory.mktemp("any")
    groups = [[Param(f"g{g}.p{i}", (n,)) for i, n in enumerate(group)] for g, group in enumerate(sizes)]
    groups = [group for group in groups if any(param.numel for param in group)]
    truth = write_checkpoint(
        tag_dir,
        world_size=world_size,
        groups=groups,
        frozen=None,
        format=format,
        master=master,
        states=states,
        sub_group_size=sub_group_size,
    )
    checkpoint = open_checkpoint(tag_dir)
    assert gather(checkpoint) == truth
    packed = sub_groups_of(world_size, groups, sub_group_size)
    assert checkpoint.shard(0).layout.params == layout_from_sub_groups(packed, world_size).params


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_elastic_and_rigid_parse_to_the_same(tmp_path, world_size):
    shards = {}
    for format in ("elastic", "rigid"):
        write_checkpoint(tmp_path / format, world_size=world_size, format=format)
        shards[format] = open_checkpoint(tmp_path / format).shard(world_size - 1)
    elastic, rigid = shards["elastic"], shards["rigid"]
    assert elastic.layout.params == rigid.layout.params
    for column in ("numel", "sub_group", "offset", "sub_group_numel"):
        assert getattr(elastic.layout, column).tolist() == getattr(rigid.layout, column).tolist()
    assert elastic.groups == rigid.groups
    assert elastic.tensor_keys == rigid.tensor_keys and elastic.scalars == rigid.scalars
    assert {key: extents.dtype for key, extents in elastic.extents.items()} == {
        key: extents.dtype for key, extents in rigid.extents.items()
    }
    assert (elastic.save_id is None, rigid.save_id) == (False, None)
    assert (elastic.train_batch_size, rigid.train_batch_size) == (2 * world_size, None)
    assert elastic.ds_config == rigid.ds_config == {"train_batch_size": 2 * world_size}


@pytest.mark.parametrize("format", ["elastic", "rigid"])
def test_hyper_parameters_keep_their_lists_and_say_which_are_tensors(tmp_path, format):
    lists = {"buffer": [[3, None], (1, [0.5])], "ints": [*range(20)], "floats": [0.5] * 20, "shapes": [(1, 2)] * 20}
    made = {"d": torch.tensor([0.5], dtype=torch.bfloat16), "n": torch.tensor(3)}
    write_checkpoint(tmp_path, world_size=2, format=format, options=[{"lr": 0.5, **lists, **made}, {"lr": 0.1}])
    first, second = opened(tmp_path).groups
    assert first.options == {"lr": 0.5, **lists, "d": 0.5, "n": 3}
    assert first.tensors == {"d": ("bfloat16", (1,)), "n": ("int64", ())} and second.tensors == {}


def test_what_a_shard_says(tmp_path):
    options = [{"lr": 0.5, "betas": (0.9, 0.99), "fused": None, "tensor_lr": torch.tensor(0.25)}, {"lr": 0.1}]
    write_checkpoint(tmp_path, world_size=2, options=options)
    shard = opened(tmp_path, 1)
    assert shard.rank == 1 and shard.layout.world_size == 2
    assert shard.groups[0].options == {"lr": 0.5, "betas": (0.9, 0.99), "fused": None, "tensor_lr": 0.25}
    assert [group.params for group in shard.groups] == [("w", "v"), ("b", "gain", "scale")]
    assert shard.tensor_keys == ((FP32, "exp_avg", "exp_avg_sq"),) * shard.layout.num_sub_groups
    assert shard.scalars[0] == {"step": ScalarValue("float32", 3.0)}
    assert shard.size == (tmp_path / optim_name(1)).stat().st_size and shard.header_bytes > 0
    assert shard.layout.num_sub_groups == 3, "the synthetic model has more sub-groups than groups"


@pytest.mark.parametrize("format", ["elastic", "rigid"])
@pytest.mark.parametrize(
    ("step", "want"),
    [
        (torch.tensor(7.0), ScalarValue("float32", 7.0)),
        (torch.tensor(7.5, dtype=torch.float64), ScalarValue("float64", 7.5)),
        (torch.tensor(7.5, dtype=torch.bfloat16), ScalarValue("bfloat16", 7.5)),
        (torch.tensor(7.5, dtype=torch.float16), ScalarValue("float16", 7.5)),
        (torch.tensor(7), ScalarValue("int64", 7)),
        (torch.tensor(True), ScalarValue("bool", True)),
        (7, ScalarValue("pyint", 7)),
        (0.1, ScalarValue("pyfloat", 0.1)),
        (True, ScalarValue("pybool", True)),
    ],
)
def test_scalars_keep_their_kind_and_value(tmp_path, format, step, want):
    write_checkpoint(tmp_path, world_size=2, format=format, step=step)
    scalar = opened(tmp_path).scalars[0]["step"]
    assert scalar == want and type(scalar.value) is type(want.value)


def test_state_that_is_none_is_a_scalar(tmp_path):
    write_checkpoint(tmp_path, world_size=2, format="rigid", states={})
    edit_optim(
        tmp_path / optim_name(0), lambda s: s["optimizer_state_dict"]["state"][0].update(momentum_buffer=None)
    )  # fmt: skip
    assert opened(tmp_path).scalars[0]["momentum_buffer"] == ScalarValue("none", None)


GRAD_SCALER = {"scale": 96.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}


def test_optimizer_and_grad_scaler_of_an_elastic_file(tmp_path):
    write_checkpoint(tmp_path, world_size=2)
    assert (opened(tmp_path).optimizer, opened(tmp_path).grad_scaler) == (None, None)  # older files have neither
    table = {"optimizer": "torch.optim.adamw.AdamW", "grad_scaler": GRAD_SCALER}
    edit_optim(tmp_path / optim_name(0), lambda state: state["zeroelastic"].update(table))
    assert (opened(tmp_path).optimizer, opened(tmp_path).grad_scaler) == (table["optimizer"], GRAD_SCALER)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", 3),
        ("grad_scaler", [1.0]),
        ("grad_scaler", {"scale": 1.0}),
        ("grad_scaler", GRAD_SCALER | {"more": 1}),
        ("grad_scaler", GRAD_SCALER | {"scale": "1"}),
    ],
)
def test_an_optimizer_or_a_grad_scaler_that_is_none(tmp_path, key, value):
    write_checkpoint(tmp_path, world_size=2)
    edit_optim(tmp_path / optim_name(0), lambda state: state["zeroelastic"].update({key: value}))
    with pytest.raises(CheckpointError, match=f"{key}.* is damaged"):
        opened(tmp_path)


def test_an_unstepped_optimizer_has_only_weights(tmp_path):
    write_checkpoint(tmp_path, world_size=2, format="rigid")
    edit_optim(tmp_path / optim_name(0), lambda state: state["optimizer_state_dict"]["state"].clear())
    assert opened(tmp_path).tensor_keys == ((FP32,),) * 3


def test_the_loss_scaler_is_kept(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    write_checkpoint(tmp_path, world_size=2, loss_scaler=LossScaler(scale=4.0))
    scaler = opened(tmp_path).scaler
    assert scaler is not None and scaler.class_name == "LossScaler"
    assert scaler.attributes["cur_scale"] == 4.0 and not scaler.dynamic and not scaler.overflow


def test_adagrads_repeated_indices_are_accepted(tmp_path):
    """Stock DeepSpeed lists flat buffers of torch.optim.Adagrad twice."""
    groups = (GROUPS[0],)
    truth = write_checkpoint(tmp_path, world_size=2, groups=groups, format="rigid", states={"sum": torch.float32})

    def repeat(state):
        group = state["optimizer_state_dict"]["param_groups"][0]
        group["params"] = group["params"] * 2

    for rank in range(2):
        edit_optim(tmp_path / optim_name(rank), repeat)
    checkpoint = open_checkpoint(tmp_path)
    assert gather(checkpoint) == truth
    assert checkpoint.shard(0).groups[0].params == ("w", "v")


def test_lean_clones_without_the_alias_are_accepted(tmp_path):
    truth = write_checkpoint(tmp_path, world_size=3, alias=False)

    def clone(state):
        for entry in state["base_optimizer_state"]:
            for key in ADAM:
                entry[key] = [tensor.clone() for tensor in entry[key]]

    for rank in range(3):
        edit_optim(tmp_path / optim_name(rank), clone)
    assert gather(open_checkpoint(tmp_path)) == truth


# ---- what is refused, and how it is called ----


def table(state):
    return state["zeroelastic"]


def nested(state):
    return state["optimizer_state_dict"]


def deep(depth: int = 60) -> list:
    """A list that is small, and 2**60 items when written out."""
    value: list = []
    for _ in range(depth):
        value = [value, value]
    return value


def autoep_groups(*counts: int) -> list[dict]:
    return [{"sub_group": i, "partition_count": count} for i, count in enumerate(counts)]


FLAT = r"fp32_flat_groups\[0\] has {} elements; 2 ranks imply 10\. The file is damaged or not from this tag"
BOTH = {
    "stage 2": (lambda s: s.update(zero_stage=2), "holds no single_partition_of_fp32_groups", CheckpointError),
    "stage 1": (lambda s: s.update(zero_stage=1), "holds no single_partition_of_fp32_groups", CheckpointError),
    "stage 0": (lambda s: s.update(zero_stage=0), "ZeRO stage 0; stages 1, 2 and 3 are read", UnsupportedError),
    "no stage": (lambda s: s.pop("zero_stage"), "ZeRO stage None", UnsupportedError),
    "stage deep": (lambda s: s.update(zero_stage=deep()), "hold one another too often", CheckpointError),
    "no AutoEP group": (lambda s: s.update(ds_zero_partition_groups=[1]), "has 1 for sub-group 0", CheckpointError),
    "AutoEP groups a dict": (lambda s: s.update(ds_zero_partition_groups={}), "None for sub-group 0", CheckpointError),
    "an AutoEP group of 3": (
        lambda s: s.update(ds_zero_partition_groups=autoep_groups(2, 3)), "'partition_count': 3", CheckpointError,
    ),
    "AutoEP": (
        lambda s: s.update(ds_zero_partition_groups=autoep_groups(2, 1)),
        r"\[2, 1\] ranks share its flat buffers: .*\(MoE\), and nothing says which",
        UnsupportedError,
    ),
    "other world": (lambda s: s.update(partition_count=4), "was saved by 4 ranks, .* by 2. .*mixed", CheckpointError),
    "count missing": (lambda s: s.pop("partition_count"), "saved by None ranks", CheckpointError),
    "count deep": (lambda s: s.update(partition_count=deep()), "hold one another too often", CheckpointError),
    "count per group": (lambda s: s.update(partition_count=[2, 2]), "mixed", CheckpointError),
    "no flats": (lambda s: s.pop("fp32_flat_groups"), "holds no fp32_flat_groups", CheckpointError),
    "flats a dict": (lambda s: s.update(fp32_flat_groups={}), "holds no fp32_flat_groups", CheckpointError),
    "flats of text": (lambda s: s.update(fp32_flat_groups=["a"]), "holds no fp32_flat_groups", CheckpointError),
    "flats too few": (lambda s: s["fp32_flat_groups"].pop(), "has 2 entries; .* implies 3", CheckpointError),
    "flat too long": (
        lambda s: s["fp32_flat_groups"].__setitem__(0, torch.zeros(11)), FLAT.format(11), CheckpointError,
    ),
    "flat too short": (lambda s: s["fp32_flat_groups"].__setitem__(0, torch.zeros(9)), FLAT.format(9), CheckpointError),
    "flat a matrix": (
        lambda s: s["fp32_flat_groups"].__setitem__(0, torch.zeros(10, 1)), FLAT.format(10), CheckpointError,
    ),
    "flat on NVMe": (
        lambda s: s["fp32_flat_groups"].__setitem__(0, torch.zeros(0)),
        r"has no elements in fp32_flat_groups\[0\]: .*NVMe.*\"format\": \"elastic\"",
        CheckpointError,
    ),
    "flat strided": (
        lambda s: s["fp32_flat_groups"].__setitem__(0, torch.zeros(20)[::2]), "is not contiguous", CheckpointError,
    ),
}  # fmt: skip


def set_table(key, column, value, sub_group=0):
    return lambda s: table(s)["sub_groups"][sub_group][key].__setitem__(column, value)


def widen(tensors, number):
    """One of several tensors of a storage reaches into the next one."""
    tensors[number] = tensors[number].as_strided((tensors[number].numel() + 1,), (1,))


ELASTIC = {
    "no table": (lambda s: s.pop("zeroelastic"), "no zeroelastic table"),
    "version 0": (lambda s: table(s).update(format_version=0), "elastic format version 0"),
    "version text": (lambda s: table(s).update(format_version="1"), "elastic format version '1'"),
    "newer version": (lambda s: table(s).update(format_version=2), "version 2 is newer than 1. Upgrade zeroelastic"),
    "other rank": (
        lambda s: table(s).update(rank=1), "written as rank 1 of 2; its name says rank 0 of 2.*wrong place",
    ),
    "other size": (lambda s: table(s).update(world_size=3), "written as rank 0 of 3; its name says rank 0 of 2"),
    "rank deep": (lambda s: table(s).update(rank=deep()), "hold one another too often"),
    "no save id": (lambda s: table(s).pop("save_id"), "has no save id"),
    "no sub-groups": (lambda s: table(s).pop("sub_groups"), "has no sub_groups"),
    "sub-group no table": (lambda s: table(s)["sub_groups"].__setitem__(0, None), "sub-group 0 .* not a table"),
    "a shape less": (lambda s: table(s)["sub_groups"][1]["shapes"].pop(), "sub-group 1 .* not a table of names"),
    "name a number": (set_table("names", 0, 5), "a parameter table holds 5"),
    "name twice": (set_table("names", 0, "b"), "parameters in more than one place: b"),
    "shape text": (set_table("shapes", 0, "54"), "a parameter table holds 'w'"),
    "shape negative": (set_table("shapes", 0, (-5, 4)), "parameter w has shape"),
    "shape huge": (set_table("shapes", 0, (1 << 62,)), "parameter w has shape"),
    "shape of True": (set_table("shapes", 0, (True,)), "parameter w has shape"),
    "shapes that overflow": (set_table("shapes", 0, (1 << 40, 1 << 40)), "more elements than any file holds"),
    "other shape": (set_table("shapes", 0, (5, 5)), r"fp32_flat_groups\[0\] has 10 elements; 2 ranks imply 13"),
    "offsets": (set_table("offsets", 0, 1), "records other owned ranges than rank 0 of 2 has"),
    "offsets huge": (set_table("offsets", 0, 1 << 80), "records other owned ranges"),
    "offsets negative": (set_table("offsets", 0, -1), "records other owned ranges"),
    "numels": (set_table("numels", 0, 9), "records other owned ranges"),
    "one of many offsets": (set_table("offsets", 1, 1, sub_group=2), "records other owned ranges"),
    "one of many numels": (set_table("numels", 2, 9, sub_group=2), "records other owned ranges"),
    "numels missing": (lambda s: table(s)["sub_groups"][0].pop("numels"), "no numels for each parameter"),
    "numels too many": (lambda s: table(s)["sub_groups"][0]["numels"].append(0), "no numels for each parameter"),
    "base a dict": (lambda s: s.update(base_optimizer_state={}), "does not hold one entry for each of 3"),
    "base too short": (lambda s: s["base_optimizer_state"].pop(), "does not hold one entry for each of 3"),
    "base of lists": (lambda s: s["base_optimizer_state"].__setitem__(0, []), "does not hold one entry"),
    "no groups": (lambda s: table(s).pop("param_groups"), "has no param_groups"),
    "group text": (lambda s: table(s)["param_groups"].__setitem__(0, "x"), "optimizer group 0 is not a group"),
    "option of no name": (
        lambda s: table(s)["param_groups"][0].update({3: 1.0}), "hyper-parameter whose name is not text",
    ),
    "group of numbers": (
        lambda s: table(s)["param_groups"][0].update(params=[0]), "optimizer group 0 is not a group",
    ),
    "lean too few": (
        lambda s: s["base_optimizer_state"][0]["exp_avg"].pop(),
        "'exp_avg' of sub-group 0 has 0 tensors; the sub-group has 1",
    ),
    "lean not a tensor": (
        lambda s: s["base_optimizer_state"][0]["exp_avg"].__setitem__(0, 1.0), "holds something that is not a tensor",
    ),
    "lean too long": (
        lambda s: s["base_optimizer_state"][0]["exp_avg"].__setitem__(0, torch.zeros(11)),
        r"'exp_avg' of sub-group 0: part 0 has shape \(11,\); rank 0 owns 10 elements",
    ),
    "one of many too long": (
        lambda s: widen(s["base_optimizer_state"][2]["exp_avg"], 0),
        r"'exp_avg' of sub-group 2: part 0 has shape \(3,\); rank 0 owns 2 elements",
    ),
    "lean of two dtypes": (
        lambda s: s["base_optimizer_state"][2]["exp_avg"].__setitem__(0, torch.zeros(2, dtype=torch.bfloat16)),
        r"mixes the dtypes \['bfloat16', 'float32'\]",
    ),
}  # fmt: skip


RIGID = {
    "no nested state": (lambda s: s.pop("optimizer_state_dict"), "holds no optimizer state"),
    "no groups": (lambda s: nested(s).pop("param_groups"), "holds no optimizer state"),
    "no state": (lambda s: nested(s).pop("state"), "holds no optimizer state"),
    "group no dict": (lambda s: nested(s)["param_groups"].__setitem__(0, 3), "optimizer group 0 is not a group"),
    "index text": (lambda s: nested(s)["param_groups"][0].update(params=["0", 1]), "other than numbers"),
    "index a list": (lambda s: nested(s)["param_groups"][0].update(params=[[0], 1]), "other than numbers"),
    "index True": (lambda s: nested(s)["param_groups"][0].update(params=[True]), "other than numbers"),
    "too many": (lambda s: nested(s)["param_groups"][0].update(params=[0, 1, 5, 6]), "refers to 2; there are 3|refers"),
    "too few": (lambda s: nested(s)["param_groups"][0].update(params=[0]), "hold 2 flat groups of 3"),
    "twice in two groups": (lambda s: nested(s)["param_groups"][0].update(params=[0, 2]), "refers to 2"),
    "state of nobody": (lambda s: nested(s)["state"].update({9: {}}), "optimizer state 9 belongs to no flat group"),
    "state no dict": (lambda s: nested(s)["state"].update({0: 1}), "optimizer state 0 belongs to no flat group"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "change", "message", "kind"),
    [pytest.param(format, *BOTH[name], id=f"{name}-{format}") for name in BOTH for format in ("elastic", "rigid")]
    + [pytest.param("elastic", *ELASTIC[name], CheckpointError, id=name) for name in ELASTIC]
    + [pytest.param("rigid", *RIGID[name], CheckpointError, id=name) for name in RIGID],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, format, change, message, kind):
    write_checkpoint(tmp_path, world_size=2, format=format)
    edit_optim(tmp_path / optim_name(0), change)
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path / optim_name(0)) in str(caught.value)


STATE = {
    "block-quantised": ({"state1": torch.zeros(10, dtype=torch.uint8), "absmax": torch.zeros(3)},
                        r"'absmax' of sub-group 0 has shape \(3,\).*Block-quantised and factored"),
    "factored": ({"row": torch.zeros(2, 5)}, "Block-quantised and factored"),
    "an object": ({"thing": {"a": 1}}, "cannot be resharded"),
    "text": ({"thing": "a"}, "'thing' of sub-group 0 is 'a', which cannot be resharded"),
    "an fp8 scalar": ({"scale": torch.tensor(1.0).to(torch.float8_e4m3fn)}, "cannot be resharded"),
    "our own name": ({"fp32": torch.zeros(10)}, "'fp32' of sub-group 0 has a name that cannot be kept"),
    "a number as name": ({3: torch.zeros(10)}, "has a name that cannot be kept"),
}  # fmt: skip


@pytest.mark.parametrize("format", ["elastic", "rigid"])
@pytest.mark.parametrize("name", STATE)
def test_state_that_cannot_be_resharded_is_refused_by_name(tmp_path, format, name):
    extra, message = STATE[name]
    write_checkpoint(tmp_path, world_size=2, format=format)

    def add(state):
        (state["base_optimizer_state"] if format == "elastic" else nested(state)["state"])[0].update(extra)

    edit_optim(tmp_path / optim_name(0), add)
    if format == "elastic" and name == "block-quantised":
        message = "Block-quantised and factored"
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize("values", [[1.0, 2.0], [torch.ones(5), torch.ones(5)], []])
def test_a_list_in_the_state_of_a_rigid_file_is_not_called_damage(tmp_path, values):
    """DeepSpeed loads it at the size that saved."""
    write_checkpoint(tmp_path, world_size=2, format="rigid")
    edit_optim(tmp_path / optim_name(0), lambda state: nested(state)["state"][0].update(history=values))
    with pytest.raises(UnsupportedError, match=r"optimizer state 'history' of sub-group 0 is \[.*cannot be resharded"):
        opened(tmp_path)


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value", [{"a": 1}, deep(), LOOP, torch.zeros(3), [0] * 5000, torch.tensor(1j)])
def test_hyper_parameters_that_are_no_plain_values_are_refused(tmp_path, value):
    write_checkpoint(tmp_path, world_size=2)
    edit_optim(tmp_path / optim_name(0), lambda state: table(state)["param_groups"][0].update(odd=value))
    with pytest.raises(ZeroElasticError) as caught:
        opened(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("root", [None, [], {}, {"optimizer_state_dict": None}, {"optimizer_state_dict": []}])
def test_a_file_without_an_optimizer_is_refused(tmp_path, root):
    torch.save(root, tmp_path / optim_name(0))
    with pytest.raises(CheckpointError, match="holds no optimizer_state_dict"):
        opened(tmp_path)


def test_a_rigid_file_needs_the_parameters(tmp_path):
    write_checkpoint(tmp_path, world_size=2, format="rigid")
    with pytest.raises(CheckpointError, match="names no parameters"):
        read_optimizer_file(tmp_path / optim_name(0), world_size=2).header(0, params=None)


KEYS = ["zero_stage", "partition_count", "fp32_flat_groups", "base_optimizer_state", "zeroelastic", "overflow",
        "optimizer_state_dict", "loss_scaler"]  # fmt: skip
ODD = st.sampled_from(
    [None, 0, -1, 1 << 70, 1.5, "x", [], {}, [[]], {"a": {}}, (1,), torch.ones(2), torch.ones(0), b"x"]
)


@given(
    format=st.sampled_from(["elastic", "rigid"]),
    path=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    key=st.sampled_from(KEYS),
    value=ODD,
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_odd_value_anywhere_is_parsed_or_refused(tmp_path, format, path, key, value):
    """Walk down from a key by the numbers of ``path`` and put something odd there."""
    if not (tmp_path / format).exists():
        write_checkpoint(tmp_path / format, world_size=2, format=format)
    source = torch.load(tmp_path / format / optim_name(0), weights_only=False)
    container, place = source["optimizer_state_dict"], key
    for number in path:
        inner = container.get(place) if isinstance(container, dict) else container[place]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        container = inner
        place = sorted(inner, key=str)[number % len(inner)] if isinstance(inner, dict) else number % len(inner)
    container[place] = value
    torch.save(source, tmp_path / "odd.pt")
    try:
        read_optimizer_file(tmp_path / "odd.pt", world_size=2).header(0, params=sub_groups_of(2))
    except ZeroElasticError as error:
        assert "odd.pt" in str(error)
