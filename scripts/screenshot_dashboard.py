"""Photographs a dashboard page that is being served, in a real headless Chromium, once its content is there.

    python -m scripts.screenshot_dashboard http://127.0.0.1:8501/placement docs/images/placement.png
    python -m scripts.screenshot_dashboard --dark --width 390 http://127.0.0.1:8501/placement /tmp/phone.png

Reports faults of the page as a browser sees it: requests to other hosts, and content cut off at the right (wider than
the window, without a way to scroll to it); either makes the exit code 1.

Starts no server. Waits until the page's script has ended, its charts are drawn and (with --wait-for) a given text is
on it, then captures the whole page. Exit code: 0, 1 when the content did not appear or is wrong, 2 for
bad arguments.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

from scripts.headless_chromium import browser, chromium, faults, open_page, photograph


def shrink(png: bytes, max_bytes: int) -> bytes:
    """The same picture with 256 colours if it is too large; charts lose nothing visible."""
    if len(png) <= max_bytes:
        return png
    packed = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        packed, "PNG", optimize=True
    )
    return packed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the page, e.g. http://127.0.0.1:8501/placement")
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("--wait-for", default="", metavar="TEXT", help="text that must stand on the page")
    parser.add_argument("--width", type=int, default=1360, help="of the window in pixels (default: 1360)")
    parser.add_argument("--dark", action="store_true", help="as a browser that prefers dark colours")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait (default: 60)")
    parser.add_argument(
        "--max-kb", type=int, default=300, help="fewer colours above this size (default: 300)"
    )
    parser.add_argument("--chromium", default="", help="program to use (default: the one that is installed)")
    args = parser.parse_args()
    program = chromium(args.chromium)
    if not program:
        print(
            "no Chromium found; install it (apt-get install chromium) or name it with --chromium",
            file=sys.stderr,
        )
        return 2
    if not args.output.parent.is_dir():
        print(f"directory {args.output.parent} does not exist; create it first", file=sys.stderr)
        return 2
    try:
        with browser(program) as tools:
            open_page(tools, args.url, width=args.width, dark=args.dark)
            png = photograph(tools, args.url, args.width, args.wait_for, timeout_s=args.timeout)
            wrong = faults(tools, args.url, args.width)
    except (TimeoutError, RuntimeError) as error:
        print(f"no picture taken: {error}", file=sys.stderr)
        return 1
    png = shrink(png, args.max_kb * 1000)
    args.output.write_bytes(png)
    print(f"{args.output}: {len(png) / 1000:.0f} kB")
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
