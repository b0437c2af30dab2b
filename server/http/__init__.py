"""HTTP under all dialects: bodies and streams, errors as responses, who is let in, logs and figures.

Knows no dialect: how errors of a path look is given to it.
"""
