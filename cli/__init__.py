"""The command line, `speculoe-local`: reads options, shows text, maps errors to exit codes."""

from __future__ import annotations

from speculoe_local.cli.app import main

__all__ = ["main"]
