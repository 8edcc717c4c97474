"""Train the small model that ships with Twofold, from public-domain books, on a CPU or a GPU.

What it is: the complete recipe for ``models/twofold-tales``, a Qwen3-MoE of 12 million parameters that
knows fairy tales. It trains a tokenizer and a model from scratch and writes a directory that Twofold,
transformers and every other reader of Qwen3-MoE checkpoints can load.

What it is not: a general trainer, nor any part of the engine. ``tales_data`` makes the training text and
``tales_model`` holds the forward pass used in training only.

    python models/training/train_default_model.py --corpus BOOKS --out models/twofold-tales --work CHECKPOINTS \\
        --valid unseen-book.txt --minutes 90

Training goes on from the last checkpoint in --work when there is one. A second, short training teaches brief
answers that end (the conversations of ``tales_short``), from the finished checkpoint of the first:

    python models/training/train_default_model.py --corpus BOOKS --out models/twofold-tales --work OTHER-CHECKPOINTS \\
        --valid unseen-book.txt --resume-from CHECKPOINTS/checkpoint.pt --finetune-minutes 20
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tales_data import (
    END_OF_TEXT,
    TURN_END,
    ChatWriter,
    TokenStream,
    read_tales,
    sliding_windows,
    tokenizer_files,
    train_tokenizer,
)
from tales_model import Model, Muon, Shape
from tales_short import ShortChatWriter
from tokenizers import Tokenizer
from torch import Tensor, nn

TOKENS_PER_STEP = 8192
MUON_LR, ADAM_LR = 0.02, 0.003
MUON_DECAY, ADAM_DECAY = 0.1, 0.1
BALANCE_WEIGHT = 0.01  # weight of each layer's load-balancing loss


@dataclass(frozen=True)
class Recipe:
    """What differs between the training from scratch and the short one after it."""

    # Up to this share of training: rows of this length, and this share of conversations among the tokens.
    phases: tuple[tuple[float, int, float], ...]
    warmup_steps: int
    decay_share: float  # the last share of training, over which the learning rate falls to zero
    peak: float  # peak learning rate, as a multiple of MUON_LR and ADAM_LR
    end_weight: float  # weight of the loss on the token that ends a turn
    writer: type[ChatWriter]
    part: float  # share of the tales, taken as running text in an epoch


FROM_SCRATCH = Recipe(
    ((0.4, 512, 0.25), (0.7, 1024, 0.4), (1.01, 1024, 0.5)), 100, 0.30, 1.0, 1.0, ChatWriter, 1.0
)
BRIEF_ANSWERS = Recipe(((1.01, 1024, 0.65),), 10, 0.9, 0.25, 2.0, ShortChatWriter, 0.25)


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    matrices = [p for layer in model.layers for p in (layer.q, layer.k, layer.v, layer.o)]
    matrices += [p for layer in model.layers for p in (layer.gate, layer.up, layer.down)]
    known = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": ADAM_DECAY},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    return [
        Muon(matrices, MUON_LR, MUON_DECAY),
        torch.optim.AdamW(groups, lr=ADAM_LR, betas=(0.9, 0.95), fused=True),
    ]


@torch.no_grad()
def bits_per_byte(model: Model, tokenizer: Tokenizer, text: str, window: int) -> tuple[float, Tensor]:
    """Total nats / ln 2 / UTF-8 bytes over a sliding window, without dropout, and the experts' shares.

    The first token has no prediction in a running text, so an ``<|endoftext|>`` is put before it and every
    byte of the text is paid for.
    """
    model.eval()
    ids = np.asarray([tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(text).ids], dtype=np.int64)
    device, nats, shares = model.embedding.device, 0.0, []
    for tokens, scored in sliding_windows(ids, window):
        row = torch.from_numpy(tokens).to(device).unsqueeze(0)
        losses, _, share = model(row[:, :-1], row[:, 1:])
        nats += losses[0, scored:].double().sum().item()
        shares.append(share)
    model.train()
    return nats / math.log(2) / len(text.encode("utf-8")), torch.stack(shares).mean(0)


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model in the layout of published Qwen3-MoE checkpoints: BF16, one tensor per projection."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = getattr(layer, name)
        tensors[f"{prefix}self_attn.q_norm.weight"] = layer.q_norm
        tensors[f"{prefix}self_attn.k_norm.weight"] = layer.k_norm
        tensors[f"{prefix}input_layernorm.weight"] = layer.input_norm
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm
        tensors[f"{prefix}mlp.gate.weight"] = layer.router
        for name in ("gate", "up", "down"):
            for expert, weight in enumerate(getattr(layer, name)):
                tensors[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = weight
    stored = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()
    }
    weights = out / "model.safetensors"
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes it for its owner alone, which a container's user may not be

    files = tokenizer_files(tokenizer, model.shape.max_position_embeddings) | _configurations(
        model, tokenizer
    )
    for name, content in files.items():
        if isinstance(content, Tokenizer):
            content.save(str(out / name))
        else:
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (out / name).write_text(text, encoding="utf-8")


def _configurations(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json and generation_config.json."""
    shape = model.shape
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{name: getattr(shape, name) for name in shape.__dataclass_fields__},
        "intermediate_size": shape.moe_intermediate_size,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": BALANCE_WEIGHT,
        "output_router_logits": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "torch_dtype": "bfloat16",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
    }
    return {"config.json": config, "generation_config.json": generation}


class Training:
    """A training run: the model, its optimisers, its data, and how far it has come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.recipe = BRIEF_ANSWERS if arguments.finetune_minutes else FROM_SCRATCH
        torch.manual_seed(arguments.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        arguments.work.mkdir(parents=True, exist_ok=True)
        self.tales = read_tales(arguments.corpus)
        vocabulary = arguments.work / "tokenizer.json"
        if arguments.resume_from and not vocabulary.exists():
            shutil.copy(arguments.resume_from.with_name("tokenizer.json"), vocabulary)
        if not vocabulary.exists():
            train_tokenizer(self.tales, Shape.vocab_size).save(str(vocabulary))
        self.tokenizer = Tokenizer.from_file(str(vocabulary))
        self.valid = arguments.valid.read_text(encoding="utf-8") if arguments.valid else ""
        self.model = Model(Shape()).to(self.device)
        self.optimizers = optimizers_of(self.model)
        self.end_of_turn = self.tokenizer.token_to_id(TURN_END)
        self.stream = TokenStream(
            self.tales, self.tokenizer, arguments.seed, self.recipe.writer, self.recipe.part
        )
        share = self.recipe.phases[0][2]
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "epoch": 0, "position": 0, "share": share}
        self.checkpoint = arguments.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self.progress = self.restore(self.checkpoint)
        elif arguments.resume_from:
            self.restore(
                arguments.resume_from
            )  # the weights and the optimisers' state; progress starts from zero
        torch.manual_seed(arguments.seed + self.progress["step"])

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Take over a checkpoint's weights and optimiser state; returns how far its run had come."""
        saved = torch.load(checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        progress: dict[str, Any] = saved["progress"]
        return progress

    def save(self) -> None:
        stream = self.stream
        self.progress |= {"epoch": stream.epoch, "position": stream.position, "share": stream.chat_share}
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        unfinished = self.checkpoint.with_suffix(".part")
        torch.save(
            {"model": self.model.state_dict(), "optimizers": states, "progress": self.progress}, unfinished
        )
        unfinished.replace(self.checkpoint)

    def budget_used(self) -> float:
        """How much of the training is over, 0 to 1, by whichever budget runs out first."""
        shares = [0.0]
        if self.arguments.steps:
            shares.append(self.progress["step"] / self.arguments.steps)
        minutes = self.arguments.finetune_minutes or self.arguments.minutes
        if minutes:
            shares.append(self.progress["seconds"] / 60 / minutes)
        return max(shares)

    def step(self, used: float, forward: Any) -> dict[str, float]:
        """One batch at the learning rate, row length and share of conversations due at this time."""
        started = time.monotonic()
        recipe = self.recipe
        _, length, chat_share = next(phase for phase in recipe.phases if used < phase[0])
        warm = (self.progress["step"] + 1) / recipe.warmup_steps
        factor = recipe.peak * min(1.0, warm, (1 - used) / recipe.decay_share)
        for optimizer, rate in zip(self.optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        batch = self.stream.batch(TOKENS_PER_STEP // length, length, chat_share)
        rows = torch.from_numpy(batch.astype(np.int64)).to(self.device)
        losses, balance, shares = forward(rows[:, :-1], rows[:, 1:])
        weights = 1 + (recipe.end_weight - 1) * (rows[:, 1:] == self.end_of_turn)
        loss = (losses * weights).sum() / weights.sum()
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        measured = {"loss": loss.item(), "busiest": shares.max().item() * Shape.num_experts}
        self.progress["step"] += 1
        self.progress["seconds"] += time.monotonic() - started
        return measured

    def run(self) -> None:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        print(f"{len(self.tales)} tales, {size:,} parameters, on {self.device}", flush=True)
        self.stream.start_epoch(self.progress["epoch"], self.progress["share"], self.progress["position"])
        forward = torch.compile(self.model, dynamic=False)
        recent: list[dict[str, float]] = []
        began = last_saved = time.monotonic()
        while (used := self.budget_used()) < 1:
            recent.append(self.step(used, forward))
            if len(recent) == 20:
                self.report(recent, time.monotonic() - began)
                recent, began = [], time.monotonic()
            if time.monotonic() - last_saved > self.arguments.save_every * 60:
                self.save()
                if self.valid:
                    score, _ = bits_per_byte(self.model, self.tokenizer, self.valid[:60_000], 512)
                    print(f"{score:.4f} bits per byte on the start of the unseen book", flush=True)
                recent, began, last_saved = [], time.monotonic(), time.monotonic()
        self.save()

    def report(self, recent: list[dict[str, float]], seconds: float) -> None:
        used = self.budget_used()
        left = self.progress["seconds"] / used - self.progress["seconds"] if used else math.inf
        loss = sum(measured["loss"] for measured in recent) / len(recent)
        print(
            f"step {self.progress['step']}  {used:6.1%}  epoch {self.stream.epoch}  loss {loss:.3f}  "
            f"busiest expert {recent[-1]['busiest']:.2f}x  "
            f"{len(recent) * TOKENS_PER_STEP / seconds:,.0f} tokens/s  {left / 60:.0f} min left",
            flush=True,
        )

    def finish(self) -> None:
        """Write the model, and measure it on the unseen book exactly as it was written."""
        export(self.model, self.tokenizer, self.arguments.out)
        print(f"written to {self.arguments.out}: {self.progress}", flush=True)
        if not self.valid:
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        score, shares = bits_per_byte(self.model, self.tokenizer, self.valid, 1024)
        print(f"{score:.4f} bits per byte on the whole unseen book (window 1024, stride 512)")
        for index, share in enumerate((shares * Shape.num_experts).tolist()):
            print(f"layer {index}: an expert's load over the mean load: {min(share):.2f} to {max(share):.2f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="directory of books as UTF-8 .txt files")
    parser.add_argument("--out", type=Path, required=True, help="where to write the model")
    parser.add_argument(
        "--work", type=Path, required=True, help="where to keep checkpoints; resumes from there"
    )
    parser.add_argument("--valid", type=Path, help="a book to measure bits per byte on; never trained on")
    parser.add_argument("--minutes", type=float, default=0, help="training time, over all resumed runs")
    parser.add_argument(
        "--steps", type=int, default=0, help=f"steps of {TOKENS_PER_STEP} tokens, over all runs"
    )
    parser.add_argument(
        "--resume-from",
        type=Path,
        help="a finished checkpoint, its tokenizer.json beside it, to train on from",
    )
    parser.add_argument(
        "--finetune-minutes",
        type=float,
        default=0,
        help="train this long for brief answers, from --resume-from",
    )
    parser.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints (default 5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--export-only", action="store_true", help="write the last checkpoint's model and stop"
    )
    arguments = parser.parse_args()
    if bool(arguments.finetune_minutes) != bool(arguments.resume_from) and not arguments.export_only:
        parser.error("--resume-from and --finetune-minutes belong together: give both or neither")
    if not (arguments.minutes or arguments.steps or arguments.finetune_minutes or arguments.export_only):
        parser.error("give a budget: --minutes, --steps or both, or --finetune-minutes")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    training = Training(arguments)
    if not arguments.export_only:
        training.run()
    training.finish()


if __name__ == "__main__":
    main()
