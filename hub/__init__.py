"""Models by name: the Hugging Face cache as a place where models come from and stay.

Knows names, downloads and files; nothing of how a model runs. Start at `pull.pull`, `cache.models`,
`resolve.resolve`; only `pull` uses the network, and only it imports the hub's library.
"""
