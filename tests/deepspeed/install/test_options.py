"""zeroelastic.deepspeed.options: safe defaults, and every mistake names the option and what is known."""

from __future__ import annotations

import pytest

from zeroelastic.deepspeed.options import Options, parse_options
from zeroelastic.errors import ConfigError


@pytest.mark.parametrize("config", [{}, {"zeroelastic": {}}, {"zero_optimization": {"stage": 3}}])
def test_the_defaults_are_the_safe_ones(config):
    options = parse_options(config)
    assert options == Options()
    assert (options.verify, options.strict, options.weights_only_load, options.fsync, options.io_engine) == (
        "read", False, False, True, "auto",
    )  # fmt: skip
    assert options.on_mismatch == "error" and options.verifies_content


def test_verify_is_full_by_default_where_a_gpu_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroelastic.deepspeed.options.is_usable", lambda name: name == "cuda")
    default = parse_options({})
    assert (default.verify_level(on_gpu=True), default.verify_level(on_gpu=False)) == ("full", "read")
    for asked in ("off", "quick", "read", "full"):
        assert parse_options({"zeroelastic": {"verify": asked}}).verify_level(on_gpu=True) == asked
    monkeypatch.setattr("zeroelastic.deepspeed.options.is_usable", lambda name: False)
    assert default.verify_level(on_gpu=True) == "read"


@pytest.mark.parametrize(
    ("value", "want"),
    [(True, "full"), (False, "off"), ("full", "full"), ("read", "read"), ("quick", "quick"), ("off", "off")],
)
def test_verify_is_a_flag_or_a_word(value, want):
    assert parse_options({"zeroelastic": {"verify": value}}).verify == want


def test_every_option_is_taken():
    block = {
        "verify": "quick", "strict": True, "on_mismatch": "initialize", "weights_only_load": True, "fsync": False,
        "save_timeout_s": 60.0, "io_engine": "numpy", "allow_globals": ["package.module.Class"], "fallback": True,
        "async_save": True, "keep_gradient_scale": False, "required": True, "keep": 3, "keep_every": 500,
        "keep_global_batch": True,
        "memory": {"every": 2, "copies": 1},
        "store_retries": 2, "store_timeout_s": 30.0,
        "format": "rigid", "frozen": "exclude", "upload": "s3://bucket/run",
    }  # fmt: skip
    assert parse_options({"zeroelastic": block}).model_dump() == block


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"every": 1, "parity": 4}, "memory.parity is 4"), ({"every": 0}, "memory.every is 0"),
        ({"copies": True}, "memory.copies is True"), ({"often": 1}, "memory.often is 1"), (True, "memory is True"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_memory_block_names_it(block: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options({"zeroelastic": {"memory": block}})


def test_a_global_that_is_no_name_of_a_class_is_refused():
    with pytest.raises(ConfigError, match=r"allow_globals is .* 'nothing' does not name a class"):
        parse_options({"zeroelastic": {"allow_globals": ["a.B", "nothing"]}})


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'verfy' \(did you mean 'verify'\?\), 'x'\. Known options: ") as caught:
        parse_options({"zeroelastic": {"verfy": True, "x": 1, "strict": True}})
    assert all(name in str(caught.value) for name in Options.model_fields)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_elastic": {"verify": "quick"}}, '"zero_elastic" .*: the block is called "zeroelastic"'),
        ({"ZeroElastic": {}}, '"ZeroElastic" .*: the block is called "zeroelastic"'),
        ({"zeroelastics": {}, "zeroelastic": {}}, '"zeroelastics" .*: the block is called "zeroelastic"'),
        ({"async_save": True}, '"async_save" at the top level .* has no effect: move it into the block "zeroelastic"'),
        ({"elastic_checkpoint": True}, 'at the top level .* has no effect: move it into "zero_optimization"'),
        ({"zeroelastic": {"elastic_checkpoint": True}}, r"\(move it into \"zero_optimization\", or write "),
        (
            {"zeroelastic": {"format": "rigid"}, "zero_optimization": {"elastic_checkpoint": True}},
            'format is "rigid", and "elastic_checkpoint" under "zero_optimization" is True: they ask for different',
        ),
        ({"zeroelastic": {"save_timeout": 1}}, r"'save_timeout' \(did you mean 'save_timeout_s'\?\)"),
    ],
)
def test_what_is_misspelt_or_in_another_place_is_named_with_the_right_one(config: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options({"train_batch_size": 4, **config})


def test_the_blocks_of_deepspeed_are_not_taken_for_ours() -> None:
    blocks = ("elasticity", "zero_optimization", "zero_allow_untested_optimizer", "checkpoint", "optimizer", "fp16")
    assert parse_options({name: {} for name in blocks}) == Options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "fully"), ("verify", 1), ("verify", None), ("strict", "yes"), ("strict", 1),
        ("strict", None), ("weights_only_load", "true"), ("fsync", 0), ("io_engine", "warp"),
        ("io_engine", None), ("io_engine", ["numpy"]),
        ("on_mismatch", "zero"), ("on_mismatch", True), ("fallback", 1), ("fallback", "newest"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_option(name, value):
    with pytest.raises(ConfigError) as caught:
        parse_options({"zeroelastic": {name: value}})
    assert f'"zeroelastic": {name} is {value!r}' in str(caught.value)


@pytest.mark.parametrize("block", [True, None, [], "verify", 3])
def test_a_block_that_is_none_is_refused(block):
    with pytest.raises(ConfigError, match="not a block of options"):
        parse_options({"zeroelastic": block})


@pytest.mark.parametrize(
    ("executor", "host"),
    [("auto", "auto"), ("numpy", "numpy"), ("native", "native"), ("cuda", "auto")],
)
def test_an_executor_for_a_gpu_leaves_the_one_for_files_to_auto(executor: str, host: str) -> None:
    assert parse_options({"zeroelastic": {"io_engine": executor}}).host_io_engine == host
