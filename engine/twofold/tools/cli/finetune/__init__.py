"""`twofold finetune`."""
