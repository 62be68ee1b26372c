"""What training frameworks need besides the engine's own methods: one module per framework, imported by nobody else."""
