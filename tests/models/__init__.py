"""Synthetic GGUF models for tests: small random ones of every expert layout, and one big one.

`tiny.build` writes a model, `tiny.cached` writes it once per directory, `fixtures.tiny_model`
is the pytest fixture. `big.build_big` streams a model larger than a page cache would like.
"""
