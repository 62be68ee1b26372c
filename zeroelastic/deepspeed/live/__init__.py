"""The running optimizer of an engine: all that ``save`` and ``load`` know of it.

    live_optimizer  ``LiveOptimizer``: layout, flat tensors, groups, state dict, and how a load fills them
    kinds           which of DeepSpeed's optimizers are covered, and the LiveOptimizer of an engine
    stage3          ZeRO-3; ``swap_files`` for what is on NVMe
    optimizers      which state keys and scalars each class of torch optimizer keeps
    trained         which parameters DeepSpeed's save lists as trained
    topology        process groups; which are not covered
    precision       loss scales
    digests         digests of the live tensors
    replicated      values that have to be equal on all ranks

Read ``live_optimizer`` first. Another kind of optimizer is a subclass of ``LiveOptimizer`` and a line in ``kinds``.
"""
