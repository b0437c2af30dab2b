"""Ways to ask for the same thing, a folder each, and what they share.

A dialect reads requests (`fields`), makes jobs of them, and writes answers (`turn`, `many_prompts`) as its
clients expect them. Knows nothing of what is behind `jobs.Backend`.
"""
