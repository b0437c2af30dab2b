"""What an answer must look like, as GBNF: JSON, schemas, calls of functions; and GBNF itself, checked.

Pure but for a cache. Knows nothing of HTTP, prompts, tokens or sampling.
"""
