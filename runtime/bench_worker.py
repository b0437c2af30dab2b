"""One side of a benchmark, in a process of its own: a model that stays open, timed on request.

    python -m speculoe_local.runtime.bench_worker < requests > replies      (JSON lines)

First line: {"path", "library" or null, "options"}; then {"prompt": [ids], "tokens": n} any number of
times. With `library` it is llama.cpp as anyone would drive it, from that folder and without a line of
ours; otherwise it is our engine. Both take the same token ids and pick the likeliest token.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Timing = dict[str, Any]


def plain_llama(
    path: str, library: str, options: dict[str, Any]
) -> Callable[[Sequence[int], int], Timing]:
    """The unpatched library: load with its defaults, llama_decode, greedy sampler."""
    os.environ["LLAMA_CPP_LIB_PATH"] = library
    from llama_cpp import llama_cpp as bound

    llama: Any = bound
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = (options[k] for k in ("ctx", "batch", "ubatch"))
    params.n_threads = params.n_threads_batch = options["threads"]
    params.no_perf = True
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"{path} cannot be opened by the library in {library}")
    sampler = llama.llama_sampler_init_greedy()

    def run(prompt: Sequence[int], n_tokens: int) -> Timing:
        _keep = silent  # the callback lives as long as the model
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        times = [time.perf_counter()]
        batch = (llama.llama_token * len(prompt))(*prompt)
        for at in range(0, len(prompt), options["batch"]):
            part = ctypes.cast(ctypes.byref(batch, 4 * at), ctypes.POINTER(llama.llama_token))
            size = min(options["batch"], len(prompt) - at)
            assert llama.llama_decode(context, llama.llama_batch_get_one(part, size)) == 0
        one = (llama.llama_token * 1)()
        tokens = []
        for _ in range(n_tokens):
            one[0] = llama.llama_sampler_sample(sampler, context, -1)
            tokens.append(one[0])
            times.append(time.perf_counter())
            if len(tokens) < n_tokens:
                assert llama.llama_decode(context, llama.llama_batch_get_one(one, 1)) == 0
        return {"times": times, "tokens": tokens}

    return run


def our_engine(path: str, options: dict[str, Any]) -> Callable[[Sequence[int], int], Timing]:
    """The engine as a caller uses it, text and statistics included."""
    from speculoe_local.runtime import Engine, EngineOptions, Sampling
    from speculoe_local.runtime.stats import exactness

    sidecar = Path(options["sidecar"]) if options["sidecar"] else None
    engine = Engine.open(path, options=EngineOptions(**(options | {"sidecar": sidecar})))

    def run(prompt: Sequence[int], n_tokens: int) -> Timing:
        engine.forget()
        before = engine.slot_stats()
        times = [time.perf_counter()]
        tokens = []
        for step in engine.generate(
            prompt, sampling=Sampling(temp=0), max_tokens=n_tokens, ignore_end=True
        ):
            times.append(time.perf_counter())
            tokens.append(step.token)
        spent = engine.slot_stats().since(before)
        return {
            "times": times,
            "tokens": tokens,
            "slots": asdict(spent),
            "prediction_s": engine.prediction_seconds,
            "exactness": exactness(engine.info.mode, rounded=engine.info.rounded),
            "kl": engine.info.quality.kl if engine.info.quality else None,
        }

    return run


def main() -> None:
    first = json.loads(sys.stdin.readline())
    if first["library"]:
        run = plain_llama(first["path"], first["library"], first["options"])
    else:
        run = our_engine(first["path"], first["options"])
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(asked["prompt"], asked["tokens"])), flush=True)


if __name__ == "__main__":
    main()
