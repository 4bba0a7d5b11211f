"""Makes quantized checkpoints of Hugging Face folders: FP8, AWQ and GPTQ, in the layouts of the public tools."""
