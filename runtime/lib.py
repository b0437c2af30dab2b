"""Find and load our libraries: the patched llama.cpp through its bindings, then libspeculoe.

Importing this module is what makes `llama_cpp` load *our* build, whatever else the machine has: it
must come before any other import of `llama_cpp` in the process, and says so when it did not.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from speculoe_local.runtime.errors import BackendError

__all__ = [
    "OWN_SYMBOLS",
    "SUFFIX",
    "Log",
    "library_folder",
    "llama",
    "llama_library",
    "log",
    "speculoe_library",
]

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
OWN_SYMBOLS = getattr(os, "RTLD_DEEPBIND", 0)
_logger = logging.getLogger("speculoe_local.llama")


_NO_DEVICES = (ctypes.c_void_p * 1)(None)


def on_cpu(params: Any) -> Any:
    """llama_model_params that take no device, also where another engine of this process has opened one."""
    params.devices = ctypes.cast(_NO_DEVICES, ctypes.c_void_p)
    params.n_gpu_layers = 0
    return params


def library_folder() -> Path:
    """The folder of libllama and libspeculoe: SPECULOE_LIB_PATH, or `lib` beside this package.

    Raises BackendError when there is none, which means that the build did not finish.
    """
    given = os.environ.get("SPECULOE_LIB_PATH")
    if given:
        folders = [Path(given)]
    else:
        # An editable install has two places for one package: the repository and site-packages.
        folders = [Path(p) / "lib" for p in sys.modules[__package__].__path__]
    for folder in folders:
        if (folder / f"libllama{SUFFIX}").exists():
            return folder
    raise BackendError(f"no libllama{SUFFIX} in {folders[0]}; run `make setup` to build it")


class Log:
    """What llama.cpp says: kept out of stdout and stderr, its last complaint kept for errors."""

    def __init__(self) -> None:
        self._recent: collections.deque[str] = collections.deque(maxlen=8)
        self._line = ""

    def __call__(self, level: int, text: bytes | None, _user_data: object) -> None:
        self._line += (text or b"").decode("utf-8", "replace")
        if not self._line.endswith("\n"):
            return  # continued by the next call (GGML_LOG_LEVEL_CONT)
        line, self._line = self._line.strip(), ""
        if level >= _WARN and line:
            self._recent.append(line)
        _logger.debug("%s", line)

    def last(self) -> str:
        """The latest warning or error, or what to do in its absence."""
        return self._recent[-1] if self._recent else "llama.cpp gave no reason"

    def clear(self) -> None:
        self._recent.clear()


_WARN = 3  # ggml_log_level


def _load() -> tuple[ModuleType, ctypes.CDLL, ctypes.CDLL, Log]:
    folder = library_folder()
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    if "OMP_WAIT_POLICY" not in os.environ:
        # libgomp reads it when it is loaded, that is, now. Its default spins for milliseconds at each
        # of a token's thousand barriers: harmless alone, 10 to 20 times slower once anything else
        # runs on one of the cores. Measured on 2 cores: as fast when idle, 15 for 0.9 tokens/s when not.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if "llama_cpp" not in sys.modules:
        # Opened here first so that a llama.cpp which someone loaded globally does not lend its symbols
        # to ours; the bindings then get this one, by its path.
        ctypes.CDLL(str(folder / f"libllama{SUFFIX}"), mode=OWN_SYMBOLS)
    module = importlib.import_module("llama_cpp.llama_cpp")
    loaded: ctypes.CDLL = module._lib
    if Path(loaded._name).parent.resolve() != folder.resolve():
        raise BackendError(
            f"llama_cpp already uses {loaded._name}; import speculoe_local.runtime before llama_cpp"
        )
    speculoe = ctypes.CDLL(str(folder / f"libspeculoe{SUFFIX}"), mode=OWN_SYMBOLS)
    kept = Log()
    kept.callback = module.llama_log_callback(kept)  # type: ignore[attr-defined]  # must outlive C
    module.llama_log_set(kept.callback, None)  # type: ignore[attr-defined]
    module.llama_backend_init()
    return module, loaded, speculoe, kept


_module, llama_library, speculoe_library, log = _load()
# The bindings are untyped where it matters (pointers); one cast here instead of one per call.
llama = cast("Any", _module)
