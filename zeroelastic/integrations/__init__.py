"""Training frameworks: their needs besides the engine's methods. Each framework has its module; none imports another.

    transformers           the Hugging Face Trainer
    trainer                the same, of front ends on top of it: what it resumes from, the saved global batch, and when
                           it removes older checkpoints
    ms_swift               ms-swift's order of samples
    accelerate             schedulers, random generators and the position in the data
    lightning              loop counters, the position in the data and the scale of gradients
    fabric                 the state of data loaders
    per_process            generators and schedulers, which accelerate and the Trainer keep for each process
    framework_checkpoints  what is done before and after a framework's own load, and around its own save

All but ``transformers`` are applied by ``deepspeed/patching`` where the framework is imported.
"""
