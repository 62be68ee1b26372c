"""The live side: DeepSpeed's ZeRO-3 optimizer as layout, source and sink. The only folder that imports deepspeed."""
