"""One loaded model that answers several requests at once: queue, lanes, batches, the KV they share, sampling.

Fulfils `jobs.Backend` (`scheduler`). Knows nothing of HTTP, dialects, conversations or other models.
"""
