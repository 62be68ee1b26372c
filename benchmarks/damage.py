"""Damage a checkpoint in every way that disks, copies and people do, and load it: is all of it noticed?

    python benchmarks/damage.py --seed 0 --out benchmarks/results
    python benchmarks/damage.py --stage 2 --flips 400 --truncations 80 --out benchmarks/results
    python benchmarks/damage.py --slices AutoTP --flips 300 --truncations 60 --out benchmarks/results

A run of 3 real DeepSpeed ranks saves two tags, another run saves the same steps. Then 2 ranks, with one engine whose
state is made wrong before each load, load the newer tag again and again, each time with one piece of damage in it. A
load must

    raise an error of zeroelastic that names the damaged file, the same on every rank ("detected"); or
    load another tag, whole, and warn that ``latest`` does not name the newest ("warned"): only where it is damaged; or
    restore, bit for bit, what was saved ("harmless"): only for bytes, or whole files, that a load does not use.

With ``--slices`` 4 ranks save, two of which share each slice of tensors or experts, and the 2 ranks that load have all
of them whole.

Anything else ends the campaign as failed: a state that differs, an error that does not name the file or is not the same
everywhere, an exception of another kind, a crash, a hang. Damage is chosen by a seeded generator.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import REPOSITORY, describe, machine, table

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_files import expert_file_name
from zeroelastic.errors import ZeroElasticError
from zeroelastic.testing import RankPool, fingerprint, gather_state
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.zip_check import read_zip_records

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import topologies  # noqa: E402
from topologies import TopologyJob  # noqa: E402

TAG, OLDER = "global_step3", "global_step2"
SAVED, LOADED = 3, 2
SLICED = {
    "AutoTP": TopologyJob("llama", tp=2, precision="bf16", frozen=True),
    "AutoEP": TopologyJob("autoep", ep=2, precision="bf16", frozen=True),
    "MoE": TopologyJob("moe", ep=2, precision="bf16", frozen=True),
}
"""By what makes slices, what ``SAVED + 1`` ranks save."""
BLOCK = 4096
VERDICTS = ("detected", "warned", "harmless", "FAILED")
LIMIT_S = 30.0
"""For one load, on average over a run of them, on a machine that does other things."""

SHARES = {
    ("optimizer", "tensor"): 24,
    ("optimizer", "between tensors"): 4,
    ("optimizer", "pickle"): 12,
    ("optimizer", "small record"): 4,
    ("optimizer", "header"): 8,
    ("optimizer", "directory"): 8,
    ("model", "frozen fragment"): 6,
    ("model", "16-bit weight"): 3,
    ("model", "buffer"): 6,
    ("model", "pickle"): 8,
    ("model", "small record"): 3,
    ("model", "header"): 5,
    ("model", "directory"): 5,
    ("expert", "weight"): 3,
    ("expert", "pickle"): 3,
    ("expert", "small record"): 1,
    ("expert", "header"): 2,
    ("expert", "directory"): 2,
    ("record", "text"): 5,
    ("latest", "text"): 2,
}
"""Where bits are flipped: the kind of file, the part of it, and its share. Where there is no such part, none."""


@dataclass(frozen=True)
class Damage:
    """One piece of damage: ``what`` is done to ``file``, a path below the directory that holds the tags.

    ``where`` says which part of which kind of file that is. ``at`` is a byte offset, or the size that is left;
    ``bit`` of a flip; ``source`` the path that the file is replaced by, or the file that it changes places with.
    """

    what: str
    where: str
    file: str
    at: int = 0
    bit: int = 0
    source: str = ""

    def apply(self, root: Path) -> None:
        """Do it, below ``root``."""
        path = root / self.file
        if self.what == "swap":
            other = root / self.source
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
        elif self.source:
            shutil.copyfile(self.source, path)
        else:
            data = bytearray(path.read_bytes())
            if self.what == "flip":
                data[self.at] ^= 1 << self.bit
            elif self.what == "zero":
                data[self.at : self.at + BLOCK] = bytes(BLOCK)
            else:
                del data[self.at :]
            path.write_bytes(data)

    @property
    def files(self) -> tuple[str, ...]:
        """The part of the checkpoint that is damaged."""
        return (self.file, self.source) if self.what == "swap" else (self.file,)


class Model(torch.nn.Module):
    """Two trained layers, a frozen one, a buffer, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up = torch.nn.Linear(16, 40)
        self.down = torch.nn.Linear(40, 16)
        self.adapter = torch.nn.Linear(16, 48)
        self.adapter.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.arange(64, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.down(torch.tanh(self.up(x))) * self.scale
        return self.adapter(x).float().pow(2).mean()


def build(stage: int, verify: str = "full", job: TopologyJob | None = None) -> Any:
    """The engine of both runs; with a ``job`` it is the engine of that."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    if job is not None:
        return topologies.build(replace(job, stage=stage, config={"zeroelastic": {"verify": verify, "fsync": False}}))
    model = Model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    config = {
        "train_batch_size": 6,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "elastic_checkpoint": True, "sub_group_size": 400},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
        "zeroelastic": {"verify": verify, "fsync": False},
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def save(directory: str, factor: float, stage: int, slices: str = "") -> None:
    """Train three steps and save after the second and the third; on ranks."""
    job = replace(SLICED[slices], lr=1e-2 * factor, seed=round(10 * factor)) if slices else None
    engine = build(stage, job=job)
    for step in range(3):
        if slices:
            topologies.step(engine, step)
        else:
            x = torch.full((6 // dist.get_world_size(), 16), factor * (step + 1), dtype=torch.bfloat16)
            engine.backward(engine(x))
            engine.step()
        if step:
            engine.save_checkpoint(directory, client_state={"step": step, "rank": dist.get_rank(), "factor": factor})


def spoil(engine: Any) -> None:
    """Make all state wrong, so that state which a load does not restore is found."""
    optimizer = engine.optimizer
    at_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    with torch.no_grad():
        for flat in optimizer.fp32_partitioned_groups_flat if at_stage_3 else optimizer.single_partition_of_fp32_groups:
            flat.fill_(7.0)
            for value in optimizer.optimizer.state.get(flat, {}).values():
                if torch.is_tensor(value):
                    value.fill_(5.0)
        for buffer in engine.module.buffers():
            buffer.fill_(-1.0)
        for param in engine.module.parameters():
            if not param.requires_grad:
                (param.ds_tensor if at_stage_3 else param).fill_(3.0)
    for group in optimizer.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 9.0
    engine.global_steps = engine.global_samples = -1


def load_all(
    directory: str,
    pristine: str,
    damages: Sequence[Damage],
    stage: int,
    verify: str = "full",
    slices: str = "",
) -> list[tuple[str, str, str]]:
    """Load under each damage, on ranks; returns for each the outcome, the type of error, and its text or the report."""
    whole = replace(SLICED[slices], tp=1, ep=1) if slices else None
    engine = build(stage, verify, whole)
    truth: dict[str, Any] = {}
    for tag in (OLDER, TAG):
        spoil(engine)
        truth[tag] = _load(engine, pristine, tag)[0]
    outcomes: list[tuple[str, str, str]] = []
    root = Path(directory)
    for damage in damages:
        spoil(engine)
        if dist.get_rank() == 0:
            damage.apply(root)
        dist.barrier()
        try:
            state, report = _load(engine, directory, None)
        except ZeroElasticError as error:
            outcomes.append(("error", type(error).__name__, str(error)))
        except Exception as error:
            outcomes.append(("foreign", type(error).__name__, str(error)))
        else:
            same = next((tag for tag in truth if truth[tag] == state), "neither tag")
            note = next((note for note in report.notes if "NOT THE NEWEST" in note), "")
            outcomes.append((f"state of {same}", "", note))
        dist.barrier()
        if dist.get_rank() == 0:
            for name in damage.files:
                shutil.copyfile(Path(pristine) / name, root / name)
    return outcomes


def _load(engine: Any, directory: str, tag: str | None) -> tuple[Any, Any]:
    """Everything that was restored, client state included, and the report."""
    path, client_state = engine.load_checkpoint(directory, tag)
    assert path is not None, "nothing was loaded"
    return (fingerprint(gather_state(engine)), sorted(client_state.items())), engine.zeroelastic_report


def regions(root: Path) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """(file, offset, bytes) of every part of every file of the tag, by kind of file and part."""
    found: dict[tuple[str, str], list[tuple[str, int, int]]] = {key: [] for key in SHARES}
    tag = root / TAG
    checkpoint = open_checkpoint(tag)
    seen: set[Path] = set()
    for rank in range(checkpoint.world_size):
        shard, model = checkpoint.shard(rank), checkpoint.model_states(rank)
        used: dict[int, int] = {}
        _, lengths = shard.layout.owned(rank)
        for key, extents in shard.extents.items():
            used |= {
                int(offset): int(length) * 4
                for offset, length in zip(extents.offset, lengths, strict=True)
                if offset >= 0 and length
            }
            assert set(extents.dtype.values()) == {"float32"}, key
        files: list[tuple[str, Any, dict[tuple[int, int], str]]]
        files = [("optimizer", shard.path, {place: "tensor" for place in used.items()})]
        if model.path not in seen:
            seen.add(model.path)
            parts = dict.fromkeys(model.fragments(), "frozen fragment")
            if checkpoint.whole_model:
                trained = {param.name for param in shard.layout.params}
                file = read_torch_file(model.path, foreign="inert")
                module: Any = file.root["module"]
                weights = (file.extent(module[name]) for name in module if name in trained)
                parts |= {(extent.offset, extent.nbytes): "16-bit weight" for extent in weights}
            files.append(("model", model.path, parts))
        if rank == 0:
            files += [("expert", tag / name, {}) for name in checkpoint.expert_files]
        for kind, path, parts in files:
            name, size = f"{TAG}/{path.name}", path.stat().st_size
            at = 0
            for record in read_zip_records(path, size):
                end = record.offset + record.nbytes
                found[kind, "header"].append((name, at, record.offset - at))
                inner = record.name.partition("/")[2]
                if inner == "data.pkl":
                    found[kind, "pickle"].append((name, record.offset, record.nbytes))
                elif not inner.startswith("data/"):
                    found[kind, "small record"].append((name, record.offset, record.nbytes))
                else:
                    gap = record.offset
                    rest = {"optimizer": "between tensors", "expert": "weight"}.get(kind, "buffer")
                    for offset, nbytes in sorted(place for place in parts if record.offset <= place[0] < end):
                        found[kind, rest].append((name, gap, offset - gap))
                        found[kind, parts[offset, nbytes]].append((name, offset, nbytes))
                        gap = offset + nbytes
                    found[kind, rest].append((name, gap, end - gap))
                at = end
            found[kind, "directory"].append((name, at, size - at))
    found["record", "text"].append((f"{TAG}/{RECORD_NAME}", 0, (tag / RECORD_NAME).stat().st_size))
    found["latest", "text"].append(("latest", 0, len(TAG)))
    return {key: [place for place in places if place[2] > 0] for key, places in found.items()}


def choose(root: Path, other: Path, *, flips: int, truncations: int, blocks: int, seed: int) -> list[Damage]:
    """The damages of a campaign. ``other`` is the directory of another run that saved the same steps."""
    chance = random.Random(seed)
    places = regions(root)
    damages: list[Damage] = []
    shares = {key: share for key, share in SHARES.items() if places[key]}
    drawn = chance.choices(list(shares), weights=list(shares.values()), k=flips - 1)
    drawn[: len(shares)] = list(shares)[: flips - 1]  # each of them at least once
    for kind, part in drawn:
        file, begin, nbytes = chance.choices(places[kind, part], weights=[p[2] for p in places[kind, part]])[0]
        at = begin + chance.randrange(nbytes)
        damages.append(Damage("flip", f"{kind}: {part}", file, at, chance.randrange(8)))
    last = len(TAG) - 1  # the digit, of which one bit makes the other tag
    damages.append(
        Damage("flip", "latest: to the other tag", "latest", last, (ord(TAG[last]) ^ ord(OLDER[last])).bit_length() - 1)
    )
    names = sorted(path.name for path in (root / TAG).glob("*.pt"))
    files = [f"{TAG}/{name}" for name in names]
    kinds = {f: "optimizer" if "optim" in f else "expert" if "_expert_" in f else "model" for f in files}
    kinds[f"{TAG}/{RECORD_NAME}"] = "record"
    for _ in range(truncations):
        file = chance.choice([*files, *files, f"{TAG}/{RECORD_NAME}", "latest"])
        size = (root / file).stat().st_size
        damages.append(Damage("truncate", kinds.get(file, "latest"), file, chance.randrange(size)))
    large = [
        (file, at)
        for file in files
        for at in range(0, (root / file).stat().st_size - BLOCK + 1, BLOCK)
        if any((root / file).read_bytes()[at : at + BLOCK])
    ]
    damages += [Damage("zero", kinds[file], file, at) for file, at in chance.choices(large, k=blocks)]
    for kind in ("optim", "model"):
        of_kind = [file for file in files if f"{kind}_states" in file]
        for i, file in enumerate(of_kind):
            damages += [Damage("swap", kinds[file], file, source=later) for later in of_kind[i + 1 :]]
    for what, tag in (("of another run", other / TAG), ("older", root / OLDER)):
        damages += [Damage(what, kinds[file], file, source=str(tag / Path(file).name)) for file in kinds]
    return damages


UNREAD = frozenset(f"{TAG}/{expert_file_name(0, expert)}" for expert in range(topologies.EXPERTS))
"""Files that a load does not open: the 16-bit weights of trained experts."""


def verdict(damage: Damage, outcomes: Sequence[tuple[str, str, str]], unread: frozenset[str] = frozenset()) -> str:
    """The verdict from the ranks' outcomes under one damage; one that begins with FAILED must not occur.

    Files that are ``unread`` may be replaced as a whole.
    """
    outcome, _, text = outcomes[0]
    if any(other != outcomes[0] for other in outcomes):
        return f"FAILED: the ranks differ: {outcomes}"
    if outcome == "error":
        named = any(Path(name).name in text for name in damage.files)
        return "detected" if named else f"FAILED: names no damaged file: {text}"
    if outcome == f"state of {TAG}" and (damage.what in ("flip", "zero") or unread.issuperset(damage.files)):
        return "harmless"
    if outcome == f"state of {OLDER}" and damage.file == "latest" and "latest" in text:
        return "warned"
    return f"FAILED: {outcome}: {text}"


def campaign(
    pool: RankPool,
    directory: Path,
    *,
    flips: int,
    truncations: int,
    blocks: int,
    seed: int,
    stage: int = 3,
    slices: str = "",
    only: int | None = None,
) -> dict[str, Any]:
    """Run it: counts by class, and every damage with its verdict. ``only`` takes a seeded sample of the damages."""
    pristine, other, work = (directory / name for name in ("pristine", "other", "work"))
    saved = SAVED + bool(slices)
    pool.run(save, saved, str(pristine), 1.0, stage, slices)
    pool.run(save, saved, str(other), 1.5, stage, slices)
    shutil.copytree(pristine, work)
    damages = choose(pristine, other, flips=flips, truncations=truncations, blocks=blocks, seed=seed)
    if only is not None:
        damages = _sample(damages, only, random.Random(seed))
    began = time.perf_counter()
    rows: list[tuple[Damage, str, str, str]] = []
    for at in range(0, len(damages), 200):
        batch = damages[at : at + 200]
        limit = 120 + LIMIT_S * len(batch)
        ranks = pool.run(load_all, LOADED, str(work), str(pristine), batch, stage, "full", slices, timeout=limit)
        for damage, outcomes in zip(batch, zip(*ranks, strict=True), strict=True):
            rows.append((damage, verdict(damage, outcomes, UNREAD), outcomes[0][1], outcomes[0][2]))
        print(f"{at + len(batch)} of {len(damages)}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return {
        "seed": seed,
        "stage": stage,
        "slices": slices,
        "saved_on": saved,
        "loaded_on": LOADED,
        "damages": len(damages),
        "seconds_per_load": round((time.perf_counter() - began) / len(damages), 3),
        "counts": count((d, told) for d, told, _, _ in rows),
        "failed": [[_plain(d), told, text] for d, told, _, text in rows if told.startswith("FAILED")],
        "raw": [[*_plain(d), told, error] for d, told, error, _ in rows],
    }


def _sample(damages: Sequence[Damage], size: int, chance: random.Random) -> list[Damage]:
    """Some of each class, as far as they go."""
    classes: dict[str, list[Damage]] = {}
    for damage in damages:
        shared = damage.where.partition(":")[0] == "shared"
        classes.setdefault(f"{damage.what} {'shared' if shared else ''}", []).append(damage)
    queues = [chance.sample(members, len(members)) for members in classes.values()]
    chosen: list[Damage] = []
    while len(chosen) < size and any(queues):
        chosen += [queue.pop() for queue in queues if queue]
    return chosen[:size]


def _plain(damage: Damage) -> list[Any]:
    """A row of the raw result; of a path, what is below the directory of the run."""
    source = "/".join(Path(damage.source).parts[-2:])
    return [damage.what, damage.where, damage.file, damage.at, damage.bit, source]


def count(verdicts: Iterable[tuple[Damage, str]]) -> list[dict[str, Any]]:
    """How many of each class came to what."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for damage, told in verdicts:
        counts.setdefault((damage.what, damage.where), Counter())[told.partition(":")[0]] += 1
    return [
        {"damage": what, "where": where, **{key: found[key] for key in VERDICTS}}
        for (what, where), found in sorted(counts.items())
    ]


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    facts = result["machine"]
    kind = f"{result['slices']} " if result["slices"] else ""
    total: Counter[str] = Counter()
    for row in result["counts"]:
        total.update({key: row[key] for key in VERDICTS})
    rows = [*result["counts"], {"damage": "**all**", "where": "", **total}]
    cells = [[str(row.get(key, 0)) for key in ("damage", "where", *VERDICTS)] for row in rows]
    lines = [
        f"# Damage of {kind}checkpoints of ZeRO stage {result['stage']}",
        "",
        *describe(facts),
        "",
        f"A {kind}checkpoint of ZeRO stage {result['stage']} and "
        f"{result['saved_on']} ranks, loaded on {result['loaded_on']} "
        'with `"verify": "full"`, '
        f"{result['damages']} times, each time with one piece of damage; {result['seconds_per_load']} s a load, seed "
        f"{result['seed']}. Detected: an error of zeroelastic that names the file, the same on every rank. Warned: "
        "another tag was loaded whole, with a warning that `latest` does not name the newest. Harmless: the damaged "
        "bytes are not used, and the state is, bit for bit, what was saved. Failed: anything else.",
        "",
        *table(["damage", "where", "detected", "warned", "harmless", "failed"], cells, text_columns=2),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="the ZeRO stage of both runs")
    parser.add_argument("--slices", choices=SLICED, default="", help="what makes slices of tensors in both runs")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--truncations", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=30, help="zeroed blocks of 4 KiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {chosen.seed}", file=sys.stderr)
    sizes = {"flips": chosen.flips, "truncations": chosen.truncations, "blocks": chosen.blocks}
    facts = machine()
    how = {"seed": chosen.seed, "stage": chosen.stage, "slices": chosen.slices}
    modules = topologies.PRELOADED if chosen.slices else ()
    with tempfile.TemporaryDirectory() as directory, RankPool(preload=modules) as pool:
        result = {"machine": facts, **campaign(pool, Path(directory), **sizes, **how)}
    page = markdown(result)
    print(page)
    if chosen.out is not None:
        raw = result.pop("raw")
        text = json.dumps(result, indent=1)[:-2] + ',\n "raw": [\n'
        text += ",\n".join(f"  {json.dumps(row)}" for row in raw) + "\n ]\n}\n"
        kind = f"_{chosen.slices.lower()}" if chosen.slices else ""
        name = f"damage{kind}{'' if chosen.stage == 3 else f'_stage{chosen.stage}'}"
        (chosen.out / f"{name}.json").write_text(text)
        (chosen.out / f"{name}.md").write_text(page)
    for damage, told, text in result["failed"]:
        print(damage, told, text, file=sys.stderr)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
