"""Fine-tuning of low-rank adapters: data, forecast, training and checkpoints of `twofold finetune`."""
