"""What training frameworks need besides the engine's own methods. Each framework has its module; none imports another.

    transformers   the Hugging Face Trainer, with ``whole_batches``
    accelerate     schedulers, random generators and the position in the data
    lightning      loop counters, the position in the data and the scale of gradients
    framework_load  what the integrations do before and after a framework's own load

``accelerate`` and ``lightning`` are applied by ``deepspeed/install/frameworks`` where the framework is imported.
"""
