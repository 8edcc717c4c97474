"""Train the bundled model's MTP layer, with which it drafts for itself (`--speculative-config`, method mtp).

The model stays as it is. The layer learns the model's own probabilities of each token, not the text's, because a draft
is accepted where the model would have said the same. Its data are the tales and brief conversations of the model's
last training; the model's hidden states are computed once and kept in --work.

    python models/training/train_mtp_layer.py --corpus BOOKS --model models/twofold-tales --work CHECKPOINTS \\
        --valid unseen-book.txt --rows 3000 --passes 2

Training goes on from the last checkpoint in --work when there is one. At the end the layer is added to --model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from prediction_files import add_layer, read_trunk
from tales_data import END_OF_TEXT, TokenStream, read_tales
from tales_model import Model, Muon, Shape
from tales_prediction import MtpLayer
from tales_short import ShortChatWriter
from tokenizers import Tokenizer
from torch import Tensor, nn

LENGTH = 512
ROWS_PER_STEP = 4
CHAT_SHARE = 0.5
DEPTH_WEIGHTS = (1.0, 0.5)
SCORED_SHARE = 0.4
"""Share of the positions whose loss is computed in a step: the head takes more time than the layer."""
TEMPERATURE = 0.8
"""The layer learns probabilities at this temperature, at which the model is sampled by default."""
MUON_LR, ADAM_LR, DECAY = 0.01, 0.002, 0.05
WARMUP_STEPS, DECAY_SHARE = 20, 0.6
BALANCE_WEIGHT = 0.01


class TrunkStates:
    """Rows of tokens and the trunk's hidden states of them, computed when first asked for and kept in files."""

    def __init__(self, trunk: Model, tokens: np.ndarray, work: Path, name: str) -> None:
        """tokens: [rows, length + 1]."""
        self._trunk, self.tokens = trunk, tokens
        path = work / f"{name}.states"
        rows, length = tokens.shape
        shape = (rows, length - 1, trunk.shape.hidden_size)
        is_new = not path.exists()
        self._states = np.memmap(path, np.float16, "w+" if is_new else "r+", shape=shape)
        self._known = np.memmap(path.with_suffix(".known"), np.uint8, "w+" if is_new else "r+", shape=(rows,))

    def rows(self, at: np.ndarray) -> tuple[Tensor, Tensor]:
        """Hidden states [rows, length, hidden] and tokens [rows, length + 1]."""
        tokens = torch.from_numpy(self.tokens[at].astype(np.int64))
        missing = [row for row in at if not self._known[row]]
        if missing:
            with torch.no_grad():
                found, _, _ = self._trunk.hidden(
                    torch.from_numpy(self.tokens[missing][:, :-1].astype(np.int64))
                )
            self._states[missing] = found.to(torch.float16).numpy()
            self._known[missing] = 1
        return torch.from_numpy(self._states[at].astype(np.float32)), tokens


def losses(
    layer: MtpLayer, trunk: Model, states: Tensor, tokens: Tensor, scored: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The loss at the positions `scored`, and each depth's share of first choices that are the model's own."""
    found, balance = layer(trunk, states[:, :-1], tokens[:, 1:-1], len(DEPTH_WEIGHTS))
    with torch.no_grad():
        wanted = (trunk.logits(states[:, 1:][:, scored]) / TEMPERATURE).softmax(-1)
        first = wanted.argmax(-1)
    total, agreed = BALANCE_WEIGHT * balance, []
    for hidden, weight in zip(found, DEPTH_WEIGHTS, strict=True):
        logits = trunk.logits(hidden[:, scored])
        loss = F.cross_entropy(logits.flatten(0, 1) / TEMPERATURE, wanted.flatten(0, 1))
        total = total + weight * loss
        agreed.append((logits.detach().argmax(-1) == first).float().mean())
    return total, agreed


def optimizers_of(layer: MtpLayer) -> list[torch.optim.Optimizer]:
    inner = layer.layer
    matrices = [layer.projection, inner.q, inner.k, inner.v, inner.o, inner.gate, inner.up, inner.down]
    known = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in layer.parameters() if id(parameter) not in known]
    return [
        Muon(matrices, MUON_LR, DECAY),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Training:
    """A training run of the layer: what it learns from, and how far it has come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        torch.manual_seed(1)
        arguments.work.mkdir(parents=True, exist_ok=True)
        self.trunk = read_trunk(arguments.model, Shape())
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
        self.states = TrunkStates(self.trunk, self.training_rows(tokenizer), arguments.work, "training")
        self.valid = TrunkStates(self.trunk, self.valid_rows(tokenizer), arguments.work, "valid")
        self.layer = MtpLayer(Shape()).eval()
        self.layer.start_from(self.trunk, *self.states.rows(np.arange(24)))
        self.optimizers = optimizers_of(self.layer)
        self.num_steps = arguments.rows // ROWS_PER_STEP * arguments.passes
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0}
        self.checkpoint = arguments.work / "checkpoint.pt"
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.layer.load_state_dict(saved["layer"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.progress = saved["progress"]

    def training_rows(self, tokenizer: Tokenizer) -> np.ndarray:
        path = self.arguments.work / "training.npy"
        if not path.exists():
            stream = TokenStream(read_tales(self.arguments.corpus), tokenizer, 3, ShortChatWriter)
            stream.start_epoch(0, CHAT_SHARE)
            np.save(path, stream.batch(self.arguments.rows, LENGTH, CHAT_SHARE).astype(np.int16))
        rows: np.ndarray = np.load(path)
        return rows

    def valid_rows(self, tokenizer: Tokenizer) -> np.ndarray:
        text = self.arguments.valid.read_text(encoding="utf-8")
        ids = [tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(text).ids]
        count = len(ids) // (LENGTH + 1)
        return np.asarray(ids[: count * (LENGTH + 1)], np.int16).reshape(count, LENGTH + 1)

    def step(self) -> list[float]:
        step = self.progress["step"]
        factor = min((step + 1) / WARMUP_STEPS, (1 - step / self.num_steps) / DECAY_SHARE, 1.0)
        for optimizer, rate in zip(self.optimizers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        per_pass = self.arguments.rows // ROWS_PER_STEP
        order = np.random.default_rng(step // per_pass).permutation(self.arguments.rows)
        at = order[step % per_pass * ROWS_PER_STEP :][:ROWS_PER_STEP]
        chosen = torch.rand(LENGTH - 1, generator=torch.Generator().manual_seed(step)) < SCORED_SHARE
        scored = chosen[len(DEPTH_WEIGHTS) :].nonzero().flatten() + len(DEPTH_WEIGHTS)
        loss, agreed = losses(self.layer, self.trunk, *self.states.rows(np.sort(at)), scored)
        loss.backward()
        nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [loss.item(), *(share.item() for share in agreed)]

    def run(self) -> None:
        last_saved = time.monotonic()
        recent: list[list[float]] = []
        if not self.progress["step"]:
            print("unseen book", *self.shown(self.validated(8)), flush=True)
        while self.progress["step"] < self.num_steps:
            began = time.process_time()
            recent.append(self.step())
            self.progress["step"] += 1
            self.progress["seconds"] += time.process_time() - began
            if len(recent) == 20:
                print(f"step {self.progress['step']} of {self.num_steps}", *self.shown(recent), flush=True)
                recent = []
            if time.monotonic() - last_saved > 120:
                self.save()
                print("unseen book", *self.shown(self.validated(16)), flush=True)
                last_saved = time.monotonic()
        self.save()

    def shown(self, measured: list[list[float]]) -> list[str]:
        loss, *agreed = np.mean(measured, 0)
        shares = " ".join(f"{share:.3f}" for share in agreed)
        return [f"loss {loss:.3f}", f"agreed {shares}", f"{self.progress['seconds'] / 60:.1f} CPU minutes"]

    @torch.no_grad()
    def validated(self, num_rows: int) -> list[list[float]]:
        measured, every = [], torch.arange(len(DEPTH_WEIGHTS), LENGTH - 1)
        for row in range(min(num_rows, len(self.valid.tokens))):
            loss, agreed = losses(self.layer, self.trunk, *self.valid.rows(np.asarray([row])), every)
            measured.append([loss.item(), *(share.item() for share in agreed)])
        return measured

    def save(self) -> None:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        unfinished = self.checkpoint.with_suffix(".part")
        torch.save(
            {"layer": self.layer.state_dict(), "optimizers": states, "progress": self.progress}, unfinished
        )
        unfinished.replace(self.checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="directory of books as UTF-8 .txt files")
    parser.add_argument("--model", type=Path, required=True, help="the model, to which the layer is added")
    parser.add_argument(
        "--work", type=Path, required=True, help="where to keep hidden states and checkpoints"
    )
    parser.add_argument("--valid", type=Path, required=True, help="a book to measure on; never trained on")
    parser.add_argument("--rows", type=int, default=3000, help=f"rows of {LENGTH} tokens (default 3000)")
    parser.add_argument("--passes", type=int, default=2, help="passes over them (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments)
    training.run()
    print("whole unseen book", *training.shown(training.validated(10**6)))
    add_layer(training.layer, arguments.model)


if __name__ == "__main__":
    main()
