"""A process whose line to a peer is cut at one place after the other: `MODEL PORT [CUT ...]`.

Prints the number of bytes that one whole answer takes, then one line for each cut: what was raised.
In a process of its own because what must not happen is that it ends.
"""

from __future__ import annotations

import sys

from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.errors import SpeculoeError
from tests.runtime.peers import Line


def answer(model: str, port: int) -> None:
    options = EngineOptions(
        threads=1, ctx=256, expert_budget="60%", device="cpu", rpc=f"127.0.0.1:{port}=2"
    )
    with Engine.open(model, options=options) as engine:
        list(engine.generate("The quick brown fox", sampling=Sampling(temp=0), max_tokens=4))


def main(model: str, port: int, parts: int) -> None:
    whole = Line(port, 1 << 60)
    answer(model, whole.port)
    whole.cut()
    for part in range(parts):
        line = Line(port, whole.passed * part // parts)
        try:
            answer(model, line.port)
            print("answered", flush=True)
        except SpeculoeError as error:
            print(type(error).__name__, error, flush=True)
        line.cut()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
