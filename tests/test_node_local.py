"""Node-local disks: each node sees its own shards, new nodes see none, and what is resumed is what was saved."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nodes import Nodes, needs_mounts, on_nodes
from saves import Saved, check_resumed
from training import Job, attempt, resume, train_and_save

from zeroelastic.testing import RankPool, compare_states

pytestmark = needs_mounts

STOCK = Job(elastic=False, installed=False, config={"checkpoint": {"use_node_local_storage": True}})


def test_stock(rank_pool: RankPool, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    outcome = rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), train_and_save, STOCK, nodes.path)[0]
    for n in (0, 1):
        print(sorted(str(p) for p in nodes.disk(n).rglob("*")))
    for placed in ((0, 1, 2), (2, 1, 0, 0, 1, 3)):
        outcomes = rank_pool.run(on_nodes, len(placed), nodes, placed, resume, STOCK.other(installed=True), nodes.path)
        check_resumed(Saved(nodes.path, outcome), outcomes, STOCK)
        print(outcomes[0].report.text())
