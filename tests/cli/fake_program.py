"""`speculoe-local` over an engine without a model: run as a script by the tests.

The last message says what the answer is to be; anything unknown is echoed, word by word.
"""

from __future__ import annotations

import itertools
import time

import speculoe_local.runtime as runtime
from speculoe_local.runtime.errors import BackendError, ContextError, ModelError
from speculoe_local.runtime.placement import Placement

RESIDENT = Placement(
    kind="resident",
    pools=(),
    staging_bytes=0,
    staging_buffers=0,
    budget_bytes=0,
    used_bytes=0,
    residency=1.0,
    smallest_bytes=0,
    reason="everything fits",
)


class FakeStats:
    def __init__(self, tokens, logits_hash):
        self._tokens = tokens
        self._hash = {"logits_sha256": "ab" * 32} if logits_hash else {}

    def to_json(self, text, finish_reason):
        return {
            "usage": {"prompt_tokens": 5, "completion_tokens": self._tokens},
            "timings": {"load_s": 0.1, "ttft_s": 0.2, "decode_tps": 12.5},
            "experts": {"tier": "resident", "mode": "exact", "hit_rate": 0.5},
            **self._hash,
        }

    def line(self):
        return f"{self._tokens} tokens, 12.5 tokens/s"


class FakeInfo:
    def __init__(self, path):
        self.name, self.architecture, self.path = "fake", "fakemoe", path
        self.n_layer, self.n_expert, self.n_expert_used, self.n_ctx = 2, 8, 2, 4096
        self.placement = RESIDENT
        self.template = None if "bare" in str(path) else "{{ messages }}"


def pieces(messages, sampling, max_tokens, options, cancel):
    last = messages[-1].content
    if last == "roles":
        return [" ".join(message.role for message in messages)]
    if last == "previous":
        return [repr(messages[-3].content), "|", repr(messages[-2].content)]
    if last == "sampling":
        return [f"temp={sampling.temp} seed={sampling.seed} max={max_tokens}"]
    if last == "options":
        return [f"budget={options.expert_budget} ctx={options.ctx} threads={options.threads}"]
    if last == "markdown":
        return ["**bo", "ld** and `co", "de`\n"]
    if last == "control":
        return ["a\x1b]0;title\x07", "b\x1b[2Jc"]
    if last == "lines":
        return (f"line {n}\n" for n in range(100_000))
    if last == "endless":
        words = (f"w{n} " for n in itertools.count())
        return itertools.takewhile(lambda word: not cancel.wait(0.005), words)
    if last == "overflow":
        raise ContextError("prompt has 9 tokens, the context 4: raise --ctx")
    if last == "crash":
        raise BackendError("llama_decode failed: 1:\nout of memory")
    if last == "bug":
        raise ZeroDivisionError("division by zero")
    if last == "stuck":
        return stuck()
    return [f"You said {last!r}"]


def stuck():
    yield "begun"
    time.sleep(60)


class FakeEngine:
    def __init__(self, path, options):
        self.info = FakeInfo(path)
        self._options = options

    @classmethod
    def open(cls, path, *, options, progress=None):
        if "damaged" in str(path):
            raise ModelError(f"model {str(path)!r} is no GGUF file: it begins with b'oops'")
        if "large" in str(path):
            for percent in range(100):
                progress(percent / 100)
                time.sleep(0.03)
        return cls(path, options)

    def chat(self, messages, *, sampling, max_tokens, stop, cancel, logits_hash):
        count = 0
        for text in pieces(messages, sampling, max_tokens, self._options, cancel):
            if cancel.is_set():
                break
            count += 1
            yield runtime.Step(count, text, None, FakeStats(count, logits_hash))
        reason = "cancel" if cancel.is_set() else "stop"
        yield runtime.Step(0, "", reason, FakeStats(count, logits_hash))

    def interrupt(self):
        pass

    def close(self):
        pass


if __name__ == "__main__":
    runtime.Engine = FakeEngine

    from speculoe_local.cli import main

    main()
