"""Twofold and llama.cpp on the same GGUF files: how often the likeliest next token is the same, teacher-forced.

    python -m benchmarks.peers.gguf_agreement model-Q8_0.gguf model-Q4_K_M.gguf [--llama-python PATH] [--json]

llama.cpp comes through llama-cpp-python (pip install 'twofold[peers]'), in this interpreter or in the one that
--llama-python names. Both are given the same token ids, those of Twofold's tokenizer; whether llama.cpp's tokenizer
gives the same ids is reported too. Both round activations, in different ways: --beside-exact reports how far each is
from the same weights in float32, computed exactly. Ends with exit code 1 if a file's agreement is below --at-least.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
ENGINES = ("twofold", "llama.cpp")

WORKER = """
import json, sys
import llama_cpp
import numpy as np
path, ids, text, out, f32_cache = json.load(sys.stdin)
kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32} if f32_cache else {}
model = llama_cpp.Llama(
    path, n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False, flash_attn=False, **kinds
)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)], np.float32))
print(json.dumps({"same_ids": model.tokenize(text.encode(), add_bos=False, special=True)[: len(ids)] == ids}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.gguf_agreement", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument(
        "--text", type=Path, help="text to read (default: the tale that `twofold quantize` compares on)"
    )
    parser.add_argument("--positions", type=int, default=200, help="tokens of the text (default: 200)")
    parser.add_argument(
        "--at-least", type=float, default=0.95, help="agreement that is enough (default: 0.95)"
    )
    parser.add_argument(
        "--llama-python", default=sys.executable, metavar="PATH", help="interpreter with llama-cpp-python"
    )
    parser.add_argument(
        "--f32-cache", action="store_true", help="llama.cpp keeps keys and values as float32, not as float16"
    )
    parser.add_argument(
        "--beside-exact",
        action="store_true",
        help="compare both with a float32 copy of the file, too (small files)",
    )
    parser.add_argument("--json", action="store_true", help="print a list of figures, one object per file")
    args = parser.parse_args()
    found, enough = [], True
    for path in args.files:
        try:
            row = compare(path, args)
        except PeerError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            enough = False
            continue
        found.append(row)
        enough &= row["agreement"] >= args.at_least and row["same_ids"]
        if not args.json:
            print_row(row)
    if args.json:
        print(json.dumps(found))
    return 0 if enough else 1


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['file']}: likeliest token the same for {100 * row['agreement']:.1f} % of {row['positions']} "
        f"positions, mean KL divergence {row['kl_mean']:.5f}, "
        f"token ids {'equal' if row['same_ids'] else 'DIFFER'}"
    )
    for name in ENGINES:
        if f"{name} agreement" in row:
            print(
                f"  {name} and float32: {100 * row[f'{name} agreement']:.1f} %, "
                f"mean KL divergence {row[f'{name} kl_mean']:.5f}",
                flush=True,
            )


class PeerError(Exception):
    """llama.cpp did not read the file."""


def compare(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from twofold.models.model_files import open_model_files
    from twofold.quantise.texts import default_text
    from twofold.text.tokenizer import Tokenizer

    text = args.text.read_text(encoding="utf-8") if args.text else default_text()
    vocab_size = open_model_files(path).config.vocab_size
    ids = Tokenizer.open(path, vocab_size=vocab_size).encode(text)[: args.positions]
    ours, exact = logits_of(path, ids), None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.npy")
        done = subprocess.run(
            [args.llama_python, "-c", WORKER],
            input=json.dumps([str(path), ids, text, str(out), args.f32_cache]),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerError(
                f"llama.cpp failed: {last} (install it: pip install 'twofold[peers]', or --llama-python PATH)"
            )
        theirs = np.load(out)[:, : ours.shape[1]]
        if args.beside_exact:
            write_exact(path, Path(folder, "exact.gguf"))
            exact = logits_of(Path(folder, "exact.gguf"), ids)
    same_ids = bool(json.loads(done.stdout.splitlines()[-1])["same_ids"])
    found = {"file": path.name, "positions": len(ids), **nearness(theirs, ours), "same_ids": same_ids}
    for name, logits in zip(ENGINES, (ours, theirs), strict=True) if exact is not None else ():
        found |= {f"{name} {key}": value for key, value in nearness(exact, logits).items()}
    return found


def logits_of(path: Path, ids: list[int]) -> F32:
    """[tokens, vocabulary] by Twofold."""
    from twofold.blocks import ops
    from twofold.models.model_files import open_model_files
    from twofold.quantise.layers import LayeredModel

    model = LayeredModel(open_model_files(path), ops.ThreadPool(0))
    return model.logits(model.hidden_states([ids])[0])


def nearness(reference: F32, logits: F32) -> dict[str, float]:
    """How often the likeliest token is the same, and the divergence of `logits` from `reference`."""
    from twofold.quantise.quality import log_probabilities

    p, q = log_probabilities(reference), log_probabilities(logits)
    return {
        "agreement": float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean()),
        "kl_mean": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
    }


def write_exact(path: Path, out: Path) -> None:
    """The same model with every tensor in float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind, *element = dict.fromkeys(field.types)
            writer.add_key_value(key, field.contents(), kind, sub_type=element[0] if element else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, np.ascontiguousarray(values).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
