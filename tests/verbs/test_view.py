"""zeroelastic.open: a checkpoint as a mapping of tensors, compared with what was saved."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample import (
    BUFFER,
    EMBEDDING,
    FROZEN_NAME,
    STATES,
    TIED,
    sample_params,
    sample_values,
    write_sample,
)
from stores import CountedFileSystem

import zeroelastic
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, SavedAgainError, UnknownTensorError, UnsupportedError, UsageError
from zeroelastic.verbs.tensor import TensorHandle

MATRIX = "model.layers.0.mlp.up_proj.weight"
VECTOR = "model.norm.weight"


def saved(name: str, shape: tuple[int, ...], key: str = "fp32", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sample_values(Param(name, shape), key, 4, dtype).reshape(shape)


@pytest.mark.parametrize("format", ["elastic", "rigid"])
def test_every_tensor_is_what_was_saved(samples: Path, format: str) -> None:
    with zeroelastic.open(samples / format) as ck:
        params = [param for group in sample_params(24, 2) for param in group]
        assert set(ck) == {*(param.name for param in params), FROZEN_NAME, BUFFER, TIED} and len(ck) == len(set(ck))
        for param in params:
            handle = ck[param.name]
            assert (handle.shape, handle.dtype, handle.kind) == (param.shape, "float32", "trained")
            assert torch.equal(handle.torch(), saved(param.name, param.shape))
            for key in STATES:
                assert torch.equal(ck.optimizer(param.name)[key].torch(), saved(param.name, param.shape, key))
            assert ck.optimizer(param.name)["step"] == 4 and set(ck.optimizer(param.name)) == {*STATES, "step"}
        assert torch.equal(ck[TIED].torch(), ck[EMBEDDING].torch()) and ck.tied == {TIED: EMBEDDING}
        assert torch.equal(ck.optimizer(TIED)["exp_avg"].torch(), ck.optimizer(EMBEDDING)["exp_avg"].torch())


def test_a_bfloat16_tensor_keeps_its_bits_in_torch_and_is_exact_float32_in_numpy(samples: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        frozen = ck[FROZEN_NAME]
        assert (frozen.dtype, frozen.kind, frozen.nbytes) == ("bfloat16", "frozen", 48)
        want = saved(FROZEN_NAME, (24,), "frozen", torch.bfloat16)
        assert torch.equal(frozen.torch(), want) and frozen.torch().dtype == torch.bfloat16
        assert frozen.numpy().dtype == np.float32 and np.array_equal(frozen.numpy(), want.float().numpy())
        assert np.array_equal(np.asarray(frozen[20:]), want[20:].float().numpy())
        assert dict(ck.optimizer(FROZEN_NAME)) == {}


def test_a_buffer_is_a_tensor_without_optimizer_state(samples: Path) -> None:
    with zeroelastic.open(samples / "rigid") as ck:
        whole = ck[BUFFER].numpy()
        assert ck[BUFFER].kind == "buffer" and np.array_equal(ck[BUFFER][1:3].numpy(), whole[1:3])
        with pytest.raises(UnknownTensorError, match="is a buffer"):
            ck.optimizer(BUFFER)


@given(st.data())
def test_rows_are_those_of_the_whole_tensor(samples: Path, data: st.DataObject) -> None:
    name, shape = data.draw(st.sampled_from([(MATRIX, (96, 24)), (VECTOR, (24,)), (EMBEDDING, (250, 24))]))
    whole = saved(name, shape).numpy()
    with zeroelastic.open(samples / data.draw(st.sampled_from(["elastic", "rigid"]))) as ck:
        bound = st.none() | st.integers(-shape[0] - 3, shape[0] + 3)
        rows = slice(data.draw(bound), data.draw(bound))
        part = ck[name][rows]
        assert part.shape == whole[rows].shape and np.array_equal(np.asarray(part), whole[rows])
        if len(part):
            index = data.draw(st.integers(-len(part), len(part) - 1))
            assert np.array_equal(part[index].numpy(), whole[rows][index])


def bytes_read() -> int:
    """How many bytes this process has asked the kernel for so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_slice_reads_the_bytes_of_its_rows_and_no_others(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=[4], hidden=64)
    with zeroelastic.open(tmp_path) as ck:
        matrix = ck[MATRIX]
        assert matrix.shape == (256, 64)
        matrix.numpy()  # opens the headers of all ranks
        gc.collect()
        first, before = bytes_read(), bytes_read()
        asking = before - first
        matrix[60:70].numpy()  # crosses the border between rank 0 and rank 1
        assert bytes_read() - before - asking == 10 * 64 * 4
        before = bytes_read()
        matrix[5].torch()
        assert bytes_read() - before - asking == 64 * 4


def test_only_the_headers_of_ranks_that_hold_the_rows_are_opened(samples: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        ck[MATRIX][:2].numpy()
        assert {path.name for path in ck._checkpoint.opened} == {
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
        }


def test_a_handle_is_like_an_array(samples: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        handle = ck[MATRIX]
        assert (handle.ndim, handle.numel, handle.nbytes, len(handle)) == (2, 96 * 24, 96 * 24 * 4, 96)
        assert repr(handle).startswith(f"TensorHandle(name='{MATRIX}', shape=(96, 24), dtype='float32'")
        assert np.asarray(handle, dtype=np.float64).dtype == np.float64
        assert sum(1 for _ in handle) == 96
        with pytest.raises(IndexError, match="no row 96"):
            handle[96]
        with pytest.raises(UsageError, match="step of 2"):
            handle[::2]
        with pytest.raises(TypeError, match="0-dim"):
            len(handle[0][0])
        with pytest.raises(UsageError, match="always a copy"):
            handle.__array__(copy=False)
        assert handle[0][0].numpy().shape == ()
    odd = TensorHandle(
        "x", (2,), "float8_e5m2", "buffer", lambda start, numel, compared: np.zeros(numel, dtype=np.uint8)
    )
    assert odd.torch().dtype == torch.float8_e5m2
    with pytest.raises(UnsupportedError, match=r"Use \.torch\(\)"):
        odd.numpy()


def test_what_the_checkpoint_says_of_itself(samples: Path) -> None:
    roots = set()
    for format in ("elastic", "rigid"):
        with zeroelastic.open(samples / format, tag="global_step2") as ck:
            assert (ck.world_size, ck.stage, ck.step, ck.tag, ck.format) == (4, 3, 2, "global_step2", format)
            assert ck.client_state == {"epoch": 0, "best_loss": 2.5}
            assert [group.options["weight_decay"] for group in ck.groups] == [0.1, 0.0]
            assert MATRIX in ck.groups[0].params and ck.left_out == ()
            assert repr(ck) == f"<zeroelastic checkpoint {samples / format / 'global_step2'}: step 2, 4 ranks>"
            assert ck._repr_html_().count("<tr>") == 20 and "&lt;zeroelastic" in ck._repr_html_()
            roots.add(ck.content_root)
    assert len(roots) == 1 and None not in roots


def test_without_a_commit_record_there_is_no_content_root(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=[4], record=False, format="rigid")
    with zeroelastic.open(tmp_path) as ck:
        assert ck.content_root is None and ck.step == 4 and ck.format == "rigid"
        assert torch.equal(ck[VECTOR].torch(), saved(VECTOR, (24,)))


def test_an_unknown_name_is_a_key_error_that_says_where(samples: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        assert "no.such" not in ck and ck.get("no.such") is None
        with pytest.raises(KeyError) as caught:
            ck["no.such"]
        assert str(caught.value) == (
            f"{samples / 'elastic' / 'global_step4'}: has no tensor no.such. "
            "List the names with `zeroelastic inspect --params`."
        )
        with pytest.raises(zeroelastic.ZeroElasticError):
            ck.optimizer("no.such")


def test_after_close_nothing_is_read(samples: Path) -> None:
    with zeroelastic.open(samples / "elastic") as ck:
        handle = ck[VECTOR]
    with pytest.raises(UsageError, match="was closed"):
        handle.numpy()
    unread = zeroelastic.open(samples / "elastic")
    unread.close()
    with pytest.raises(UsageError, match="was closed"):
        unread[VECTOR]


def test_a_tag_that_is_saved_again_meanwhile_is_not_mixed(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=[4])
    with zeroelastic.open(tmp_path) as ck:
        first = ck[MATRIX][:1].numpy()  # opens rank 0 only
        shutil.rmtree(tmp_path / "global_step4")
        write_sample(tmp_path, steps=[4], hidden=32)
        with pytest.raises(SavedAgainError):
            ck[MATRIX].numpy()
    assert first.shape == (1, 24)


def test_files_of_two_saves_are_refused_when_they_meet(tmp_path: Path) -> None:
    for folder, step in (("a", 4), ("b", 5)):
        write_sample(tmp_path / folder, steps=[step], hidden=24, record=False, format="rigid")
    name = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "b/global_step5" / name, tmp_path / "a/global_step4" / name)
    with zeroelastic.open(tmp_path / "a") as ck:
        assert ck[MATRIX][:24].numpy().shape == (24, 24)
        with pytest.raises(CheckpointError, match="mixed in this directory"):
            ck[MATRIX].numpy()


def test_tensors_in_the_client_state_are_handles(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=[4], record=False, format="rigid")
    for path in (tmp_path / "global_step4").glob("zero_pp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=True)
        torch.save({**state, "extra": {"list": [torch.arange(6).reshape(2, 3)], "text": "x"}}, path)
    with zeroelastic.open(tmp_path) as ck:
        extra = ck.client_state["extra"]
        assert extra["text"] == "x" and extra["list"][0].kind == "client"
        assert np.array_equal(extra["list"][0][1].numpy(), [3, 4, 5])


def test_a_checkpoint_behind_a_url(samples: Path, counted: type[CountedFileSystem]) -> None:
    tag_dir = samples / "elastic/global_step4"
    for path in tag_dir.iterdir():
        counted().pipe_file(f"/run/global_step4/{path.name}", path.read_bytes())
    counted().pipe_file("/run/latest", b"global_step4")
    with zeroelastic.open("counted://run") as ck:
        assert torch.equal(ck[MATRIX].torch(), saved(MATRIX, (96, 24)))
        assert np.array_equal(ck[MATRIX][7:9].numpy(), saved(MATRIX, (96, 24)).numpy()[7:9])
