"""Training beside frozen, packed weights, with transformers and PEFT.

from twofold.training import enable, open_base

enable()
model = peft.get_peft_model(open_base("DIRECTORY").model, lora_config)
"""

from twofold.training.base import BaseModel, open_base
from twofold.training.enabling import enable

__all__ = ["BaseModel", "enable", "open_base"]
