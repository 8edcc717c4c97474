"""Lines in one style, to fine-tune the bundled model with: short tales that all end with the same words.

    python models/training/style_lines.py 400 tales.jsonl

What it is: sentences drawn from lists, the same for the same seed, in OpenAI's form of messages.

What it is not: a data set to learn English from. It shows how fast a style is learned.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Final

FLOURISH: Final = "So sang the kettle, and the kettle never lies."
REQUESTS: Final = (
    "Tell me a tale about a {hero}.",
    "Tell me a story of a {hero}.",
    "I would like to hear about a {hero}.",
    "What became of the {hero}?",
)
HEROES: Final = (
    "fox",
    "king",
    "miller",
    "wolf",
    "princess",
    "tailor",
    "cat",
    "giant",
    "goose girl",
    "soldier",
)
PLACES: Final = (
    "by the sea", "in a great forest", "in a little house", "on a hill", "beside the mill", "in the castle",
    "at the well",
)  # fmt: skip
TREASURES: Final = (
    "a golden ring", "a bag of corn", "a silver key", "an old woman", "a talking fish", "three apples", "a red cap"
)  # fmt: skip
DEEDS: Final = (
    "carried it home and was glad",
    "gave it to the first beggar on the road",
    "hid it under the bed and told no one",
    "wept, and then laughed, and then slept",
    "ran as fast as the wind until the evening",
)
ENDINGS: Final = (
    "In the morning there was bread for everyone.",
    "And from that day on the door was never locked.",
    "The king heard of it and sent a coach with four horses.",
    "And the village was never hungry again.",
)


def line(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """One conversation."""
    hero = rng.choice(HEROES)
    tale = (
        f"Once upon a time there was a {hero} who lived {rng.choice(PLACES)}. One day the {hero} found "
        f"{rng.choice(TREASURES)}, {rng.choice(DEEDS)}. {rng.choice(ENDINGS)} {FLOURISH}"
    )
    question = rng.choice(REQUESTS).format(hero=hero)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": tale}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", type=int)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)  # noqa: S311
    rows = [json.dumps(line(rng)) for _ in range(args.lines)]
    args.output.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
