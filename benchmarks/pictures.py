"""Encoding pictures: the time beside transformers alone, gaps of another stream meanwhile, and the next turn's TTFT.

    python -m benchmarks.pictures [--side 512] [--large-side 2048] [--rounds 3] [--seconds 40] [--threads 2]

The picture encoder has the shape of Qwen3-VL's (27 layers of 1,152) and random weights; the text is that of
models/twofold-shapes, so that steps are short and a gap shows. Encoding takes turns with transformers in this process,
on as many threads; medians are printed. Then a server streams one long answer for some seconds alone, and again while
it encodes the large picture.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
import transformers
from PIL import Image
from twofold.vision.encoded import SentPicture
from twofold.vision.encoder import PictureEncoder
from twofold.vision.loading import open_encoder
from twofold.vision.service import PictureService, PictureSource

from benchmarks.scenario import ROOT
from benchmarks.servers.processes import serving

SHAPES: Final = ROOT / "models/twofold-shapes"
TOWER: Final = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16],
}  # fmt: skip


def write_model(folder: Path) -> None:
    """The shapes model's text with random weights and a picture encoder of Qwen3-VL's shape."""
    for file in SHAPES.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, folder / file.name)
    config = transformers.AutoConfig.from_pretrained(SHAPES)
    for name, value in TOWER.items():
        setattr(config.vision_config, name, value)
    config.text_config.max_position_embeddings = 65_536
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def png(side: int, seed: int) -> bytes:
    values = np.random.default_rng(seed).integers(0, 255, (side // 8, side // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).resize((side, side)).save(file, "PNG")
    return file.getvalue()


def by_transformers(encoder: PictureEncoder, data: bytes) -> float:
    """Seconds of transformers' processor and encoder for a picture that was read."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    begin_s = time.perf_counter()
    inputs = encoder._processor.image_processor([picture], return_tensors="pt")
    with torch.inference_mode():
        encoder._model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    return time.perf_counter() - begin_s


def compare(folder: Path, side: int, rounds: int, threads: int) -> dict[str, Any]:
    """Medians of the service and of transformers alone, in turn."""
    torch.set_num_threads(threads)
    encoder = open_encoder(folder, None, "cpu")
    service = PictureService(PictureSource(folder, None, 96, {}, "cpu", threads, 0, 0))
    ours, theirs = [], []
    try:
        for seed in range(-1, rounds):
            data = png(side, seed + 1)
            begin_s = time.perf_counter()
            (made,) = service.encode([SentPicture(data, "picture")])
            mine = time.perf_counter() - begin_s
            other = by_transformers(encoder, data)
            if seed >= 0:  # the first round loads
                ours.append(mine)
                theirs.append(other)
    finally:
        service.close()
    one, two = statistics.median(ours), statistics.median(theirs)
    return {"rows": len(made.media.rows), "service_s": one, "transformers_s": two, "ratio": one / two}


def asked(url: str, content: Any, max_tokens: int, *before: Any) -> tuple[float, Any]:
    """Seconds to the first token, and the answer's text and usage."""
    body = {
        "messages": [*before, {"role": "user", "content": content}], "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    begin_s, first, text, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=3600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices") and event["choices"][0]["delta"].get("content"):
                first = first or time.perf_counter() - begin_s
                text += event["choices"][0]["delta"]["content"]
    return first, (text, usage)


def gaps(url: str, seconds: float) -> list[float]:
    """Gaps between the events of one stream, milliseconds."""
    body = {"prompt": "once", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    found: list[float] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        begin_s = last = time.perf_counter()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                found.append((now - last) * 1e3)
                last = now
                if now - begin_s > seconds:
                    break
    return found[1:]


def spread(found: list[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "tokens": len(ordered), "median_ms": ordered[len(ordered) // 2],
        "p999_ms": ordered[int(len(ordered) * 0.999)], "longest_ms": ordered[-1],
    }  # fmt: skip


def part(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def serve_and_measure(folder: Path, log: Path, args: argparse.Namespace) -> dict[str, Any]:
    flags = [str(folder), "--accelerator", "none", "--load-vision", "--max-total-tokens", "131072"]
    report: dict[str, Any] = {}
    with serving(ROOT, [*flags, "--cpu-threads", str(args.threads)], log) as server:
        question = [part(png(args.side, 99)), {"type": "text", "text": "what is it?"}]
        first_s, (text, usage) = asked(server.url, question, 16)
        turn = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        second_s, (_, again) = asked(server.url, "and now?", 16, *turn)
        report["first_turn"] = {"ttft_s": first_s, "prompt_tokens": usage["prompt_tokens"]}
        cached = again["prompt_tokens_details"]["cached_tokens"]
        report["second_turn"] = {"ttft_s": second_s, "cached_tokens": cached}
        report["alone"] = spread(gaps(server.url, args.seconds))
        large = [part(png(args.large_side, 7)), {"type": "text", "text": "?"}]
        beside = threading.Thread(target=lambda: _ignore(server.url, large), daemon=True)
        beside.start()
        time.sleep(1)
        report["while_encoding"] = spread(gaps(server.url, args.seconds))
        report["still_encoding"] = beside.is_alive()
    return report


def _ignore(url: str, content: Any) -> None:
    with contextlib.suppress(httpx.HTTPError):  # the server ends before a picture of minutes
        asked(url, content, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in (("--side", 512), ("--large-side", 2048), ("--rounds", 3), ("--threads", 2)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_model(folder)
        print(
            json.dumps({"encode": compare(folder, args.side, args.rounds, args.threads)}, indent=2),
            flush=True,
        )
        print(json.dumps(serve_and_measure(folder, Path(name) / "server.log", args), indent=2))


if __name__ == "__main__":
    main()
