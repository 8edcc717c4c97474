"""Train a very small model that reads pictures of drawn shapes, on a CPU in minutes.

What it is: the complete recipe for ``models/twofold-shapes``, a Qwen3-VL with experts of 0.9 million parameters that
answers "What is in the picture?" about the pictures of ``shapes_pictures``. transformers' own class is trained, vision
tower and text together from random weights, and Twofold measures the result on pictures that training has not seen.

    python models/training/train_shapes_model.py --out models/twofold-shapes --minutes 22
    python models/training/train_shapes_model.py --out models/twofold-shapes --measure 500
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from shapes_pictures import (
    CHAT_TEMPLATE,
    KINDS,
    QUESTION,
    SPECIAL_TOKENS,
    UNTRAINED,
    Kind,
    pictures,
    train_tokenizer,
)
from tales_model import Muon
from torch import Tensor
from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.vision.encoder import PictureEncoder

BATCH: Final = 32
MUON_RATE, ADAM_RATE = 0.02, 0.003
WARMUP_STEPS: Final = 30
DECAY_SHARE: Final = 0.4
"""The last share of training, over which the rates fall to zero."""
SHOWN_STEPS: Final = 100
ADAM_NAMES: Final = ("embed_tokens.weight", "pos_embed.weight", "mlp.gate.weight")
PATCH: Final = 8
TRAINED: Final = tuple(kind for kind in KINDS if kind not in UNTRAINED)
TEXT_PREFIXES: Final = ("model.language_model.", "lm_head.")


def configuration(vocabulary: int, ids: dict[str, int]) -> Any:
    """The model's sizes."""
    text = {
        "vocab_size": vocabulary, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 1024, "router_aux_loss_coef": 0.01,
        "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
        "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": PATCH,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64, "out_hidden_size": 96,
        "deepstack_visual_indexes": [1],
    }  # fmt: skip
    tokens = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
    tokens |= {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"]}
    return transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens
    )


def write_tokenizer(out: Path) -> Any:
    """Write tokenizer, chat template and the settings of pictures; returns transformers' tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    end, turn_end, *others = SPECIAL_TOKENS[0], SPECIAL_TOKENS[2], SPECIAL_TOKENS[1], *SPECIAL_TOKENS[3:]
    roles = {"pad_token": end, "eos_token": turn_end, "additional_special_tokens": others}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(), model_max_length=1024, **roles
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 48 * 48, "longest_edge": 64 * 64},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def prompt(tokenizer: Any, picture_text: str) -> str:
    """A question about a picture, in whose place `picture_text` stands."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    text: str = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return text.replace("<|image_pad|>", picture_text)


class Batches:
    """Batches of pictures with questions and answers, padded on the right."""

    def __init__(self, out: Path, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._processor = transformers.AutoImageProcessor.from_pretrained(out)
        self._stream = pictures(TRAINED, seed)
        self._picture_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def batch(self) -> dict[str, Tensor]:
        pairs = list(islice(self._stream, BATCH))
        inputs = self._processor([picture for _, picture in pairs], return_tensors="pt")
        rows = [
            self._row(kind, int(grid.prod()) // 4)
            for (kind, _), grid in zip(pairs, inputs["image_grid_thw"], strict=True)
        ]
        longest = max(len(ids) for ids, _ in rows)
        pad = self._tokenizer.pad_token_id
        ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        mask = torch.tensor([[n < len(ids) for n in range(longest)] for ids, _ in rows]).long()
        kinds = (ids == self._picture_id).long()
        return {
            **inputs,
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "mm_token_type_ids": kinds,
        }

    def _row(self, kind: Kind, num_tokens: int) -> tuple[list[int], list[int]]:
        asked = self._tokenizer(prompt(self._tokenizer, "<|image_pad|>" * num_tokens))["input_ids"]
        answer = self._tokenizer(f"{kind.answer}<|im_end|>")["input_ids"]
        return asked + answer, [-100] * len(asked) + answer


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside layers, AdamW for embeddings, norms, biases and routers."""
    named = list(model.named_parameters())
    inside = [each for name, each in named if each.ndim in (2, 3) and not name.endswith(ADAM_NAMES)]
    known = {id(parameter) for parameter in inside}
    others = [parameter for _, parameter in named if id(parameter) not in known]
    return [
        Muon(inside, MUON_RATE, 0.0),
        torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(out: Path, minutes: float, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = write_tokenizer(out)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration(configuration(len(tokenizer), ids))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizers = optimizers_of(model)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    batches, begin, step, right = Batches(out, tokenizer, seed), time.monotonic(), 0, 0.0
    while (share := (time.monotonic() - begin) / (60 * minutes)) < 1:
        rate = min(1.0, (step + 1) / WARMUP_STEPS, (1 - share) / DECAY_SHARE)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate
        batch = batches.batch()
        result = model(**batch, output_router_logits=True)
        model.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        right += share_right(result.logits, batch["labels"]) / SHOWN_STEPS
        if step % SHOWN_STEPS == 0:
            seconds = time.monotonic() - begin
            print(
                f"{seconds:5.0f} s, step {step}: loss {result.loss.item():.3f}, {right:.1%} right", flush=True
            )
            right = 0.0
    print(f"{step} steps of {BATCH} pictures")
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone


def share_right(logits: Tensor, labels: Tensor) -> float:
    """Share of answers of which every token is the most likely one."""
    known = labels[:, 1:] != -100
    same = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return (same | ~known).all(1).float().mean().item()


def answers(out: Path, asked: Sequence[Image.Image]) -> list[str]:
    """What Twofold's engine answers, greedily, about each picture."""
    tensors = load_file(out / "model.safetensors")
    vision = {name: each for name, each in tensors.items() if not name.startswith(TEXT_PREFIXES)}
    encoder = PictureEncoder(out, vision)
    engine = Engine.load(EngineConfig(model=str(out), accelerator="none", max_total_tokens=4096))
    found: list[list[int]] = [[] for _ in asked]
    for number, picture in enumerate(asked):
        (made,) = encoder.pictures([encoder.prepared(picture)])
        placed = encoder.placed(encoder.tokenizer(prompt(encoder.tokenizer, made.text))["input_ids"], [made])
        engine.submit(
            GenerationRequest(
                placed.token_ids,
                SamplingParams(max_tokens=12, temperature=0.0),
                lambda chunk, tokens=found[number]: tokens.extend(chunk.token_ids),  # type: ignore[misc]
                str(number),
                media=placed.media,
            )
        )
        engine.step()
    while engine.step():
        pass
    engine.close()
    return [encoder.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def measure(out: Path, count: int) -> None:
    """Print the share of right answers: kinds that training showed, and kinds that it did not."""
    for label, kinds in (("trained kinds", TRAINED), ("untrained kinds", UNTRAINED)):
        pairs = list(islice(pictures(kinds, seed=1_000_003), count))
        found = answers(out, [picture for _, picture in pairs])
        right = sum(kind.answer == answer for (kind, _), answer in zip(pairs, found, strict=True))
        wrong = [
            (kind.answer, answer)
            for (kind, _), answer in zip(pairs, found, strict=True)
            if kind.answer != answer
        ]
        print(f"{label}: {right} of {count} right ({right / count:.1%}); wrong: {wrong[:5]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the model")
    parser.add_argument("--minutes", type=float, default=0, help="training time; 0: do not train")
    parser.add_argument(
        "--measure", type=int, default=500, help="pictures of each group to measure (default 500)"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # products are so small that a second thread costs more than it computes
    if arguments.minutes:
        train(arguments.out, arguments.minutes, arguments.seed)
    measure(arguments.out, arguments.measure)


if __name__ == "__main__":
    main()
