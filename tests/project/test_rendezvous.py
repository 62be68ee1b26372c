"""torchrun's rendezvous in fractions of a second: its settings, and that torch finds and takes it."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import entry_points
from threading import Thread
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from zeroelastic.errors import ConfigError
from zeroelastic.rendezvous import BACKEND, DEFAULTS, create_handler


def parameters(port: int, **settings: str) -> RendezvousParameters:
    return RendezvousParameters(
        BACKEND, f"127.0.0.1:{port}", "job", 1, 2, local_addr="127.0.0.1", is_host="1" if not port else "0", **settings
    )


def test_the_package_offers_it_to_torchrun() -> None:
    (found,) = [entry for entry in entry_points(group="torchrun.handlers") if entry.name == BACKEND]
    with pytest.raises(ConfigError, match="close_timeout is '-1'"):
        found.load()()(parameters(1, close_timeout="-1"))


def test_torchrun_imports_zeroelastic_only_for_its_rendezvous() -> None:
    code = "import sys, torch.distributed.run; print([name for name in sys.modules if name.startswith('zeroelastic')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "value"), [("last_call_timeout", "0"), ("poll_interval", "soon"), ("join_timeout", "nan")]
)
def test_a_setting_that_is_no_time_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        create_handler(parameters(1, **{name: value}))


def test_settings_reach_torch_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents meet at once where both come, and one goes on alone half a second after the other was lost."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    monkeypatch.setattr(dynamic_rendezvous, "_delay", dynamic_rendezvous._delay)  # put back at the end
    settings = {"last_call_timeout": "0.3", "keep_alive_interval": "0.1", "poll_interval": "0.05"}
    rendezvous_handler_registry._registry[BACKEND] = create_handler
    host: Any = rendezvous_handler_registry.create_handler(
        RendezvousParameters(BACKEND, "127.0.0.1:0", "job", 1, 2, local_addr="127.0.0.1", is_host="1", **settings)
    )
    given = host._settings
    assert given.timeout.last_call == timedelta(seconds=0.3) and given.keep_alive_interval == timedelta(seconds=0.1)
    assert given.keep_alive_max_attempt == DEFAULTS["keep_alive_max_attempt"] and host.get_backend() == BACKEND
    port = host._store.port if hasattr(host._store, "port") else host._store.underlying_store.port
    guest: Any = rendezvous_handler_registry.create_handler(parameters(port, **settings))
    met: list[Any] = []
    threads = [Thread(target=lambda one=one: met.append(one.next_rendezvous())) for one in (host, guest)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted((info.rank, info.world_size) for info in met) == [(0, 2), (1, 2)]
    assert time.monotonic() - began < 10.0
    guest._stop_heartbeats()  # as when its process is killed
    began = time.monotonic()
    alone = host.next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1)
    assert time.monotonic() - began < 10.0  # torch's own: 45
    host.shutdown()
