"""From what a client said to the tokens that a model continues: conversations, and gaps in code.

Knows nothing of HTTP, dialects or how answers come to be.
"""
