"""What can go wrong with a model by name. Each message is one line: what, the value, the next step.

HubError
├── NoSuchModelError   no such repository, revision, quant or file; the message lists what there is
├── AccessError        the hub wants a token, or its licence accepted, first
├── NetworkError       the hub does not answer, answers too slowly, or limits requests
├── OfflineError       offline, and the model is not complete in the cache
├── NotPulledError     the name is in order, the model is not in the cache
├── IncompleteError    in the cache with files missing
├── SpaceError         the disk is too small; what was fetched is kept
├── DamagedError       a file is not what the hub says it is, or no GGUF
└── InUseError         the model is open, or being pulled
"""

from __future__ import annotations

from speculoe_local.runtime.errors import SpeculoeError

__all__ = [
    "AccessError",
    "DamagedError",
    "HubError",
    "InUseError",
    "IncompleteError",
    "NetworkError",
    "NoSuchModelError",
    "NotPulledError",
    "OfflineError",
    "SpaceError",
]


class HubError(SpeculoeError):
    """Base of what models by name raise."""


class NoSuchModelError(HubError):
    """The hub, or the cache, has no such repository, revision, quant or file."""


class AccessError(HubError):
    """The hub does not let this user have it."""


class NetworkError(HubError):
    """The hub did not answer, or not in a usable way."""


class OfflineError(HubError):
    """It would need the network, which must not be used."""


class NotPulledError(HubError):
    """The model is not in the cache."""


class IncompleteError(HubError):
    """Part of the model is in the cache."""


class SpaceError(HubError):
    """The disk does not hold it."""


class DamagedError(HubError):
    """The bytes are not those that the hub promised."""


class InUseError(HubError):
    """Somebody has it open."""
