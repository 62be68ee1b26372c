"""zeroelastic.deepspeed.live: saves and loads know DeepSpeed's optimizer only as a ``LiveOptimizer``."""

import ast
from pathlib import Path

import zeroelastic

PACKAGE = Path(zeroelastic.__file__).parent / "deepspeed"
BLIND = sorted(path for room in ("load", "save", "node_local") for path in (PACKAGE / room).glob("*.py"))


def test_saves_and_loads_do_not_reach_into_the_optimizer() -> None:
    kinds = ("deepspeed.runtime.zero.stage", "zeroelastic.deepspeed.live.stage", "zeroelastic.deepspeed.live.group")
    for path in BLIND:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(kinds), path
            if isinstance(node, ast.Attribute) and node.attr == "optimizer" and isinstance(node.value, ast.Name):
                assert node.value.id != "live", path
