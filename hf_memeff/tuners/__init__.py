"""PEFT glue: configs, tuner models, files on disk, and attaching to a model that already has LoRA adapters."""
