"""Whether a job can be run at all, found out before it waits. Pure."""

from __future__ import annotations

from speculoe_local.server.errors import BadRequest, ContextOverflow
from speculoe_local.server.jobs import Job

__all__ = ["check"]


def check(job: Job, *, n_vocab: int, n_ctx: int) -> None:
    """Raises ContextOverflow, or BadRequest naming what is not usable."""
    n = len(job.tokens)
    if n == 0:
        raise BadRequest("the prompt is empty; give at least one token", "prompt")
    answers = not job.embeddings and job.max_tokens != 0
    if n > n_ctx - int(answers):
        raise ContextOverflow(n, n_ctx)
    if "" in job.stop:
        raise BadRequest("a stop string is empty and would end every answer; leave it out", "stop")
    for name, tokens in (("prompt", job.tokens), ("logit_bias", tuple(job.logit_bias))):
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < n_vocab:
                raise BadRequest(f"token {token} is not in 0..{n_vocab - 1}", name)
