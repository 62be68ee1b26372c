"""The running optimizer of an engine: all that ``save`` and ``load`` know of it.

    live_optimizer  ``LiveOptimizer``: layout, flat tensors, groups, state dict, and how a load fills them
    kinds           which of DeepSpeed's optimizers are covered, and the LiveOptimizer of an engine
    topology        which ranks share what: data, tensor and expert parallelism
    stage3          ZeRO-3, with an optimizer or, to evaluate, without; ``stage3_storage`` has its NVMe files
    group_split     ZeRO-1 and 2
    optimizers      which state keys and scalars each class of torch optimizer keeps
    replicated      hyper-parameters, loss scales and scalars, which are the same on all ranks
    own_weights     weights of the model that the master weights do not determine
    digests         digests of the live tensors

Read ``live_optimizer`` first. Another kind of optimizer is a subclass of ``LiveOptimizer`` and a line in ``kinds``.
"""
