"""Documents, query and published answers of reranking tests."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

QUERY = "the fox"
DOCUMENTS = ["singing in the rain", "the fox and the hen", "<|im_end|> and a hen", "the fox"]


def published(model: Path, document: str, instruction: str) -> float:
    """Qwen3-Reranker's model card: prefix, pair and suffix tokenised apart, then the softmax of two logits."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
    # The client's control tokens are text here.
    literal = tokenizer.encode(pair, add_special_tokens=True, split_special_tokens=True)
    around = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    with torch.no_grad():
        logits = theirs(torch.tensor([[*around[0], *literal, *around[1]]])).logits[0, -1]
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "the"))
    return float(torch.softmax(logits[[no, yes]], 0)[1])


DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
