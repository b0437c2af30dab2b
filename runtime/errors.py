"""Errors a caller may want to tell apart. Each message is one line: value, limit, next step.

SpeculoeError
├── ModelError        the GGUF is missing, malformed, truncated, or not what was promised
├── SidecarError      the sidecar is damaged or belongs to another model
├── BudgetError       the expert budget is below what one token needs
├── OptionError       an option's value is not usable; a command line maps it to exit code 2
├── TemplateError     the chat template raises, loops or grows without bound
├── ContextError      the prompt or the answer does not fit the context
├── SourceError       reading expert weights failed while answering (file, offset, layer)
└── BackendError      llama.cpp or a device refused; the message carries its last log line
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BudgetError",
    "ContextError",
    "ModelError",
    "OptionError",
    "SidecarError",
    "SourceError",
    "SpeculoeError",
    "TemplateError",
]


class SpeculoeError(Exception):
    """Base of every error raised on purpose; `str(error)` is one line fit for a user."""


class ModelError(SpeculoeError):
    """The GGUF is missing, malformed, truncated, or not what was promised."""


class SidecarError(SpeculoeError):
    """The sidecar is damaged or belongs to another model."""


class BudgetError(SpeculoeError):
    """The expert budget is below what one token needs."""


class OptionError(SpeculoeError):
    """An option's value is not usable."""


class TemplateError(SpeculoeError):
    """The chat template raises, loops or grows without bound."""


class ContextError(SpeculoeError):
    """The prompt or the answer does not fit the context."""


class SourceError(SpeculoeError):
    """Reading expert weights failed while answering."""


class BackendError(SpeculoeError):
    """llama.cpp or a device refused."""
