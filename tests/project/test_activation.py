"""``ZEROELASTIC=1``: the line in zeroelastic.pth, the import hook, and what an unchanged program makes of both.

The hook is shown in a virtual environment of its own, which has the .pth file, with stand-ins for deepspeed and for
what the hook starts; the launchers with the real ones.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest
from environments import Environment
from places import ROOT

import zeroelastic
from zeroelastic import ConfigError, activation

LINE = activation.LINE


class Activated(Environment):
    """One that has zeroelastic.pth, with ``path`` on its module path."""

    def __init__(self, folder: Path, *path: Path) -> None:
        super().__init__(folder, "--without-pip", PYTHONPATH=os.pathsep.join(map(str, path)))
        (self.site / activation.FILE).write_text(LINE)
        (self.site / "repository.pth").write_text(f"{ROOT}\n")

    def code(self, code: str, **env: str) -> str:
        return self.output("python", "-c", textwrap.dedent(code), **env)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Activated:
    """deepspeed, and what of zeroelastic the hook calls, as a few lines each."""
    folder = tmp_path_factory.mktemp("stand-ins")
    files = {
        "deepspeed/__init__.py": "print('deepspeed')",
        "deepspeed/engine.py": "",
        "deepspeed/data.txt": "data",
        "zeroelastic/__init__.py": "def install(): print('started')",
        "zeroelastic/activation.py": (ROOT / "zeroelastic/activation.py").read_text(),
        "deepspeed-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    made = Activated(folder, folder)
    # In the environment itself too, for Pythons that do not look at PYTHONPATH.
    for name in ("deepspeed", "zeroelastic"):
        shutil.copytree(folder / name, made.site / name)
    return made


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_imported_unless_it_is_asked_for(stand_ins, value):
    env = {} if value is None else {"ZEROELASTIC": value}
    code = "import sys; print(len(sys.meta_path)); import deepspeed; print('zeroelastic' in sys.modules)"
    bare = stand_ins.run("python", "-S", "-c", "import sys; print(len(sys.meta_path))").stdout
    assert stand_ins.code(code, **env) == f"{bare}deepspeed\nFalse\n"


USES = {
    "import": "import deepspeed",
    "import of a module of it": "import deepspeed.engine",
    "from": "from deepspeed import engine",
    "by name": "import importlib; importlib.import_module('deepspeed')",
    "find_spec before": "import importlib.util as u; assert u.find_spec('deepspeed').origin; import deepspeed",
    "find_spec of a module before": "import importlib.util as u; u.find_spec('deepspeed.engine')",
    "asked three times": "import importlib.util as u; [u.find_spec('deepspeed') for _ in range(3)]; import deepspeed",
    "metadata before": "from importlib.metadata import version; assert version('deepspeed') == '9.9'; import deepspeed",
    "pkgutil before": "import pkgutil; assert [m for m in pkgutil.iter_modules() if m.name == 'deepspeed']",
    "module_from_spec": "import importlib.util as u, sys; s = u.find_spec('deepspeed'); m = u.module_from_spec(s)\n"
    "sys.modules['deepspeed'] = m; s.loader.exec_module(m)",
    "lazy loader": "import importlib.util as u, sys; s = u.find_spec('deepspeed'); s.loader = u.LazyLoader(s.loader)\n"
    "m = u.module_from_spec(s); sys.modules['deepspeed'] = m; s.loader.exec_module(m); m.__doc__",
    "a finder that asks again": "import importlib.util as u, sys\n"
    "class Finder:\n"
    "    busy = False\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if self.busy or name != 'deepspeed': return None\n"
    "        self.busy = True\n"
    "        try: return u.find_spec(name)\n"
    "        finally: self.busy = False\n"
    "sys.meta_path.insert(0, Finder())\n"
    "import deepspeed",
    "threads": "import threading\n"
    "def use(): import deepspeed\n"
    "t = [threading.Thread(target=use) for _ in range(8)]; [x.start() for x in t]; [x.join() for x in t]",
}


@pytest.mark.parametrize("use", USES)
def test_it_starts_once_after_deepspeed_was_imported(stand_ins, use):
    code = USES[use] + "\nimport deepspeed, zeroelastic.activation as a; assert a.is_active()"
    assert stand_ins.code(code, ZEROELASTIC="1") == "deepspeed\nstarted\n"


def test_the_module_is_what_it_is_without_the_hook(stand_ins):
    code = """
        import importlib.resources as r, inspect, pkgutil
        import deepspeed
        print(type(deepspeed.__loader__).__name__, deepspeed.__spec__.loader is deepspeed.__loader__)
        print(r.files("deepspeed").joinpath("data.txt").read_text().strip(), inspect.getsource(deepspeed).strip())
        print(pkgutil.get_data("deepspeed", "data.txt").decode().strip())
        print([module.name for module in pkgutil.iter_modules(deepspeed.__path__)])
    """
    assert stand_ins.code(code, ZEROELASTIC="1").replace("started\n", "") == stand_ins.code(code)


def test_a_reload_starts_it_again(stand_ins):
    code = "import importlib, deepspeed; importlib.reload(deepspeed)"
    assert stand_ins.code(code, ZEROELASTIC="1") == "deepspeed\nstarted\n" * 2


def test_processes_that_a_program_starts_have_it_too(stand_ins):
    (stand_ins.work / "job.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "def work():\n    import deepspeed\n"
        "if __name__ == '__main__':\n"
        "    for how in ('spawn', 'forkserver', 'fork'):\n"
        "        p = multiprocessing.get_context(how).Process(target=work)\n"
        "        p.start(); p.join(); assert p.exitcode == 0\n"
        "    subprocess.run([sys.executable, '-c', 'import deepspeed'], check=True)\n"
    )
    for how in (["job.py"], ["-m", "job"]):
        done = stand_ins.run("python", *how, ZEROELASTIC="1")
        assert done.stdout == "deepspeed\nstarted\n" * 4, done.stderr


def test_isolated_pythons_have_it_and_those_without_site_do_not(stand_ins):
    assert stand_ins.run("python", "-I", "-c", "import deepspeed", ZEROELASTIC="1").stdout == "deepspeed\nstarted\n"
    assert stand_ins.run("python", "-S", "-c", "import deepspeed", ZEROELASTIC="1").stdout == "deepspeed\n"


def test_an_environment_with_the_packages_of_another_has_it(stand_ins, tmp_path):
    """``--system-site-packages``, where the .pth lies with the other environment: two files start it once."""
    other = Activated(tmp_path)
    (other.site / activation.FILE).unlink()
    (other.site / "other.pth").write_text(f"import site; site.addsitedir({str(stand_ins.site)!r})\n" * 2)
    assert other.code("import deepspeed", ZEROELASTIC="1") == "deepspeed\nstarted\n"


@pytest.mark.parametrize("value", ["yes", "true", "2", "on"])
def test_another_value_stops_what_imports_deepspeed_and_nothing_else(stand_ins, value):
    assert stand_ins.code("print('fine')", ZEROELASTIC=value) == "fine\n"
    done = stand_ins.run("python", "-c", "import deepspeed; print('went on')", ZEROELASTIC=value)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert f"RuntimeError: ZEROELASTIC={value}: " in done.stderr and f"1 (on) or 0 (off), not {value!r}" in done.stderr


def test_a_failure_is_said_though_the_program_takes_deepspeed_for_missing(stand_ins, tmp_path):
    """And a program that tries again does not get DeepSpeed alone."""
    package = tmp_path / "zeroelastic"
    package.mkdir()
    (package / "__init__.py").write_text("def install(): raise ValueError('it has changed.')\n")
    shutil.copy(ROOT / "zeroelastic/activation.py", package)
    code = """
        for attempt in range(2):
            try:
                import deepspeed
            except Exception as error:
                print(type(error).__name__)
    """
    path = f"{tmp_path}:{stand_ins.env['PYTHONPATH']}"
    done = stand_ins.run("python", "-c", textwrap.dedent(code), ZEROELASTIC="1", PYTHONPATH=path)
    assert done.stdout == "deepspeed\nRuntimeError\n" * 2
    line = "ZEROELASTIC=1: zeroelastic could not be installed into DeepSpeed: ValueError: it has changed."
    assert done.stderr.count(line) == 2


def test_a_start_that_never_imports_deepspeed_costs_less_than_20_ms(stand_ins):
    def seconds(**env: str) -> float:
        begin = time.perf_counter()
        stand_ins.code("pass", **env)
        return time.perf_counter() - begin

    pairs = [(seconds(), seconds(ZEROELASTIC="1")) for _ in range(15)]
    assert statistics.median(on - off for off, on in pairs) < 0.02


# --- the real ones ----------------------------------------------------------------------------------------------------

SCRIPT = """
import logging, os, deepspeed, zeroelastic
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

installed, wrapped = zeroelastic.is_installed(), DeepSpeedEngine.load_checkpoint.__wrapped__ is not None
said, handler = [], logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("DeepSpeed").addHandler(handler)
DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
before = len(said)
zeroelastic.uninstall()
DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
assert "elastic checkpointing is deprecated" in said[-1]
print("RANK", os.environ["RANK"], installed, wrapped, before)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Activated:
    """An environment that has the packages of this one."""
    made = Activated(tmp_path_factory.mktemp("real"))
    (made.site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (made.work / "train.py").write_text(SCRIPT)
    return made


LAUNCHERS = {
    "torchrun": "-m torch.distributed.run --standalone --nproc_per_node 2 train.py",
    "deepspeed": "-m deepspeed.launcher.launch --world_info eyJsb2NhbGhvc3QiOiBbMF19 --master_port 0 train.py",
    "accelerate launch": "-m accelerate.commands.launch --use_deepspeed --zero_stage 3 --num_processes 1 "
    "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0 train.py",
}
OTHERS = [pytest.param(name, marks=pytest.mark.extended) for name in LAUNCHERS if name != "torchrun"]


@pytest.mark.starts_processes
@pytest.mark.support("Frameworks", "`ZEROELASTIC=1`: torchrun, `deepspeed`, `accelerate launch`", "exact")
@pytest.mark.parametrize("launcher", ["torchrun", *OTHERS])
def test_every_rank_of_a_launcher_has_it(real, launcher):
    done = real.run("python", *LAUNCHERS[launcher].split(), ZEROELASTIC="1")
    assert done.returncode == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    # The last number: how often DeepSpeed said that elastic checkpoints are unsupported, while zeroelastic was there.
    assert ranks == [f"RANK {rank} True True 0" for rank in range(2 if launcher == "torchrun" else 1)]


@pytest.mark.parametrize(("value", "seconds"), [("90", 90.0), ("0.5", 0.5), ("0", None), ("", None)])
def test_the_timeout_of_collectives_can_be_set_with_it(monkeypatch, value, seconds):
    done: list[object] = []
    monkeypatch.setattr(zeroelastic, "install", lambda: done.append("installed"))
    monkeypatch.setattr("zeroelastic.elastic.leaving.set_collective_timeout", done.append)
    monkeypatch.setenv("ZEROELASTIC_COLLECTIVE_TIMEOUT", value)
    activation.start(activation._timeout())
    assert done == ["installed", *([seconds] if seconds else [])]


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_another_timeout_is_an_error_before_anything_is_changed(monkeypatch, value):
    monkeypatch.setattr(zeroelastic, "install", lambda: pytest.fail("installed"))
    monkeypatch.setenv("ZEROELASTIC_COLLECTIVE_TIMEOUT", value)
    with pytest.raises(ConfigError, match=f"^ZEROELASTIC_COLLECTIVE_TIMEOUT is {value!r}; it is a number of seconds"):
        activation.start(activation._timeout())
