"""`speculoe-local doctor`: what was found on this machine, and what follows from it."""

from __future__ import annotations

import json

from speculoe_local.cli import options as opt

__all__ = ["doctor"]


def doctor(model: opt.ModelName = None, json_: opt.Json = False) -> None:
    """Say what this machine and this build are: cores, memory, disk, libraries, patches.

    The disk is measured with MODEL, or with the embedded model.
    """
    from speculoe_local.runtime import doctor as runtime

    findings = runtime.examine(opt.resolve_model(model))
    if json_:
        print(json.dumps({"findings": runtime.as_json(findings)}))
        return
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.topic:{width}}  {finding.found}")
        if finding.follows:
            print(f"{'':{width}}  -> {finding.follows}")
