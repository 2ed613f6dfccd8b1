"""How much does `import autopar` add to `import jax`?

`python -m benchmarks.import_time` starts fresh interpreters by turns, and prints the ratio of the
medians: 1.0 means that autopar costs nothing on top of JAX. The target is under 0.3 s on top, which
is printed as a share of that limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

LIMIT_SECONDS = 0.3


def _seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run((sys.executable, "-c", program), check=True)
    return time.perf_counter() - start


def main() -> int:
    """Measures and prints one JSON line; the exit status is 0 within the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    pairs = [(_seconds("import jax"), _seconds("import jax, autopar")) for _ in range(rounds + 1)]
    alone, both = (statistics.median(side) for side in zip(*pairs[1:], strict=True))  # 0: warm-up
    record = {
        "benchmark": "import_time",
        "ratio": round(both / alone, 3),
        "share_of_limit": round((both - alone) / LIMIT_SECONDS, 3),
    }
    print(json.dumps(record))
    return 0 if both - alone < LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
