"""Tools to test sharded training: functions run on ranks of one machine, and a test that training resumes.

    results = run_ranks(fn, 4)                  fn on four new processes that form a process group
    with RankPool() as pool: pool.run(fn, 3)    the same without the start-up time
    assert_resumes(build, ds_config, 4, 3, batch=batch)
    gather_state(engine)                        the whole training state, to compare

Importing this imports neither torch nor deepspeed. With ZEROELASTIC_TEST_VERBOSE=1 what ranks print is shown.
"""

from __future__ import annotations

from zeroelastic.testing.pool import RankError, RankPool, RankTimeoutError, run_ranks
from zeroelastic.testing.rank import RankFailure
from zeroelastic.testing.resume import assert_resumes
from zeroelastic.testing.state import compare_states, fingerprint, gather_state

__all__ = [
    "RankError",
    "RankFailure",
    "RankPool",
    "RankTimeoutError",
    "assert_resumes",
    "compare_states",
    "fingerprint",
    "gather_state",
    "run_ranks",
]
