"""Ray's workers import DeepSpeed with zeroelastic, by the environment of the driver or by ``runtime_env``; else not."""

from __future__ import annotations

import os
import subprocess
import sys

HOW = {"unset": False, "inherited": True, "runtime_env": True}


def look() -> bool:
    import deepspeed  # noqa: F401

    import zeroelastic

    return zeroelastic.is_installed()


def drive(how: str) -> None:
    import ray

    class Actor:
        def look(self) -> bool:
            return look()

    runtime_env = {"env_vars": {"ZEROELASTIC": "1"}} if how == "runtime_env" else {}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=runtime_env)
    task, actor = ray.remote(look), ray.remote(Actor)
    found = {ray.get(task.remote()), ray.get(actor.remote().look.remote())}
    ray.shutdown()
    assert found == {HOW[how]}, f"{how}: {found}"
    print(f"Ray {ray.__version__}, ZEROELASTIC {how}: {found.pop()} in a task and in an actor")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        drive(sys.argv[1])
    else:
        for how in HOW:
            env = {key: value for key, value in os.environ.items() if key != "ZEROELASTIC"}
            env |= {"RAY_USAGE_STATS_ENABLED": "0"} | ({"ZEROELASTIC": "1"} if how == "inherited" else {})
            subprocess.run([sys.executable, __file__, how], env=env, check=True, timeout=300)
