"""Training frameworks: their needs besides the engine's methods. Each framework has its module; none imports another.

    transformers   the Hugging Face Trainer
    trainer        the same, of front ends on top of it: what it resumes from, and when it removes older checkpoints
    trainer_batch  the saved global batch at another number of ranks
    ms_swift       ms-swift's order of samples
    accelerate     schedulers, random generators and the position in the data
    lightning      loop counters, the position in the data and the scale of gradients
    fabric         the state of data loaders
    framework_load  what the integrations do before and after a framework's own load
    framework_save  a framework's own save, and the note on which save its files are of

All but ``transformers`` are applied by ``deepspeed/install/frameworks`` where the framework is imported.
"""
