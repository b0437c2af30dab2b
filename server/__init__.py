"""The REST server: editors, agents and scripts talk to it over HTTP in the dialects they know.

    http -> dialects -> prompt, grammar -> jobs.Job -> models -> batching -> jobs.Delta -> toolcalls -> dialects

One folder per arrow. Which folder may know which is what tests/server/test_folders.py holds them to.
"""
