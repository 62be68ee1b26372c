"""``export --adapters``: PEFT's own files, from tags of real DeepSpeed runs, and PEFT loads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_command
from safetensors.torch import load_file
from training import initialize

import zeroelastic
from zeroelastic.errors import UnsupportedError, UsageError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.convert.safetensors_files import adapters_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def base_model(kind: str = "") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=kind == "tied", **sizes))
    if kind == "buffers":
        model.lm_head = torch.nn.Sequential(ChannelsLast(16), torch.nn.Linear(16, 40, bias=False))
    return model


class ChannelsLast(torch.nn.BatchNorm1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


def peft_model(kind: str) -> Any:
    import peft  # seconds, which each worker would spend on collecting the tests
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": ["q_proj", "v_proj"]}
    if kind == "vera":
        model = get_peft_model(base_model(), peft.VeraConfig(r=2, **targets))
    elif kind == "prompt":
        model = get_peft_model(base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    elif kind == "embedding":
        model = get_peft_model(base_model(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    elif kind == "two":
        model = get_peft_model(base_model(), LoraConfig(r=2, **targets))
        model.add_adapter("other", LoraConfig(r=3, use_dora=True, target_modules=["o_proj"]))
        model.base_model.set_adapter(["default", "other"])
    else:
        saved: dict[str, Any] = {
            "modules_to_save": {"modules_to_save": ["lm_head"]},
            "buffers": {"modules_to_save": ["lm_head"]},
            "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            "bias": {"bias": "lora_only"},
        }[kind]
        model = get_peft_model(base_model(kind), LoraConfig(r=2, **targets, **saved))
    return model


def train_and_save(kind: str, stage: int, directory: str) -> None:
    """Save without frozen weights, in full, and as PEFT does, in a folder of each."""
    options = {"verify": True}
    engine = initialize(peft_model(kind), {"stage": stage}, train_micro_batch_size_per_gpu=2, zeroelastic=options)
    for step in range(2):
        tokens = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(f"{directory}/excluded", exclude_frozen_parameters=True)
    engine.save_checkpoint(f"{directory}/full")
    if stage != 3 and torch.distributed.get_rank() == 0:
        engine.module.save_pretrained(f"{directory}/peft")


KINDS = ("two", "modules_to_save", "buffers", "tied", "bias", "vera", "prompt", "embedding")


def save_each(directory: str) -> None:
    """Each kind at stage 2, and one at stage 3."""
    for kind in KINDS:
        train_and_save(kind, 2, f"{directory}/{kind}")
    train_and_save("two", 3, f"{directory}/two at stage 3")


@pytest.fixture(scope="module")
def saves(topology_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One start of ranks, which import PEFT."""
    directory = tmp_path_factory.mktemp("adapters")
    topology_pool.run(save_each, 2, str(directory))
    return directory


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, saves: Path) -> Path:
    """The folders ``excluded``, ``full`` and ``peft``; PEFT's configurations are beside the tags, as by the Trainer."""
    directory = saves / request.param
    for config in (directory / "peft").rglob(CONFIG):
        for name in ("excluded", "full"):
            target = directory / name / config.relative_to(directory / "peft")
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(config, target)
    return directory


@pytest.mark.parametrize("name", ["excluded", "full"])
def test_an_adapter_has_the_names_and_tensors_of_peft(run: Path, tmp_path: Path, name: str) -> None:
    """Except the base layer of an embedding: an export of a save without frozen weights says that it is left out."""
    report = zeroelastic.export(run / name, tmp_path / "out", adapters=True)
    base = {"base_model.model.model.embed_tokens.base_layer.weight"} if run.name == "embedding" else set()
    left = base if name == "excluded" else set()
    assert report.frozen == len(base - left)
    assert len(report.left_out) == len(left) and all(one in report.left_out[0] for one in left)
    assert report.buffers == {"buffers": 3, "vera": 2}.get(run.name, 0)  # of the BatchNorm; the projections
    want = sorted(path.relative_to(run / "peft") for path in (run / "peft").rglob("adapter_*"))
    assert sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")) == want
    assert sorted(file.name for file in report.files) == sorted(map(str, want))
    for path in want:
        if path.name == WEIGHTS:
            ours, theirs = load_file(tmp_path / "out" / path), load_file(run / "peft" / path)
            assert ours.keys() == theirs.keys() - left and base <= theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        else:
            assert (tmp_path / "out" / path).read_bytes() == (run / "peft" / path).read_bytes()


def test_peft_loads_it(run: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    zeroelastic.export(run / "excluded", tmp_path / "out", adapters=True)
    folders = (tmp_path / "out", run / "peft")
    loaded, same = (PeftModel.from_pretrained(base_model(run.name), str(one)).state_dict() for one in folders)
    assert loaded.keys() == same.keys()
    assert all(torch.equal(loaded[key], same[key]) for key in same)


def test_one_of_several_adapters(saves: Path, tmp_path: Path) -> None:
    """At stage 3, by the command line; a name that is none is refused with those that are."""
    shutil.copytree(saves / "two at stage 3", tmp_path, dirs_exist_ok=True)
    done = run_command(
        "export", tmp_path / "excluded", tmp_path / "out", "--adapter", "other", "--dtype", "bf16", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "out").rglob("*.*")] == [f"out/other/{WEIGHTS}"]
    weights = load_file(tmp_path / "out/other" / WEIGHTS)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "base_model.model.model.layers.0.self_attn.o_proj.lora_magnitude_vector" in weights
    with pytest.raises(UsageError, match=r"no adapter nobody\. There are default, other"):
        zeroelastic.export(tmp_path / "excluded", tmp_path / "none", adapter="nobody")


METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 2},
    "AdaLoraConfig": {"total_step": 10},
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"oft_block_size": 4, "r": 0},
    "BOFTConfig": {"boft_block_size": 4},
    "VeraConfig": {"r": 2, "save_projection": False},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "FourierFTConfig": {"n_frequency": 4},
    "MissConfig": {"r": 2},
    "HRAConfig": {"r": 2},
    "RandLoraConfig": {"r": 2},
    "C3AConfig": {"block_size": 8},
    "RoadConfig": {"variant": "road_1", "group_size": 4},
    "GraloraConfig": {"r": 4, "gralora_k": 2},
    "WaveFTConfig": {"n_frequency": 4},
    "OSFConfig": {},
    "DeloraConfig": {"r": 2},
    "TrainableTokensConfig": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    "AdaptionPromptConfig": {"adapter_len": 3, "adapter_layers": 1, "target_modules": None, "task_type": "CAUSAL_LM"},
    "PrefixTuningConfig": {"num_virtual_tokens": 3, "target_modules": None, "task_type": "CAUSAL_LM"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "VBLoRAConfig": {"r": 2, "num_vectors": 4, "vector_length": 4},
    "ShiraConfig": {"r": 1},
    "PromptEncoderConfig": {"num_virtual_tokens": 3, "target_modules": None, "task_type": "CAUSAL_LM"},
}


def of_method(name: str, options: dict[str, Any]) -> tuple[Any, set[str]]:
    """A model, and the names of its trained parameters."""
    import peft

    options = {"target_modules": ["q_proj", "v_proj"], **options}
    config = getattr(peft, name)(**{key: value for key, value in options.items() if value is not None})
    model = peft.get_peft_model(base_model(), config)
    return model, {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.filterwarnings("ignore")
def test_every_method_has_the_names_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are known here; the others are refused."""
    from peft import get_peft_model_state_dict
    from peft.tuners.boft import layer

    # It would be compiled, and where that fails CXX stays another compiler, with which all ops are compiled again.
    monkeypatch.setattr(layer, "get_fbd_cuda", lambda: None)
    for name, options in METHODS.items():
        model, trained = of_method(name, options)
        state, theirs = model.state_dict(), get_peft_model_state_dict(model)
        ours = {new: old for old, new in adapters_of(trained, state.keys() - trained)["default"].items()}
        assert ours.keys() == theirs.keys(), name
        assert all(torch.equal(state[ours[key]], theirs[key]) for key in theirs), name
    for name, options in REFUSED.items():
        _, trained = of_method(name, options)
        with pytest.raises(UnsupportedError, match="by save_pretrained of PEFT"):
            adapters_of(trained)


def test_a_frozen_half_of_an_adapter_is_exported_or_missed() -> None:
    """As by LoRA-FA, which trains B alone."""
    halves = [f"up.lora_{half}.default.weight" for half in "AB"]
    assert [*adapters_of(halves[1:], halves[:1])["default"].values()] == ["up.lora_B.weight", "up.lora_A.weight"]
    with pytest.raises(UnsupportedError, match=r"up\.lora_B\.weight without up\.lora_A\.weight"):
        adapters_of(halves[1:])


def test_names_of_no_adapter() -> None:
    assert adapters_of(["up.weight", "lora_A.weight", "x.lora_A", "x.lora_A./etc.weight"]) == {}


def test_without_peft_the_trained_weights_keep_their_names(samples: Path, tmp_path: Path) -> None:
    report = zeroelastic.export(samples / "elastic", tmp_path / "out", adapters=True)
    assert report.trained and not report.frozen and not report.buffers
    assert [file.name for file in report.files] == ["model.safetensors"]
    assert report.notes is not None and report.notes[0].startswith("no adapter of PEFT was recognised: ")
    with pytest.raises(UsageError, match="are not PEFT's"):
        zeroelastic.export(samples / "elastic", tmp_path / "none", adapter="default")
