"""The page at `/`, and its files in static/. Knows nothing of models but what a snapshot says."""
