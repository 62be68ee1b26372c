"""Jobs that change size in the same processes: who is in the job, one world after the other, and what goes between.

    rendezvous  torchrun's agents: each starts its node by itself
    roster      the job's store, each request with a limit: nodes, members, heartbeats and the world
    membership  this process as a member: the members agree on the next world
    world       the job at one size, and what follows it
    job         ``worlds``, the function that users call: this process from world to world

Read ``job``, then ``membership``. The state itself is moved by ``deepspeed.resize``.
"""
