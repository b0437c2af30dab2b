"""Trained estimators of routers: pairs on disk, torch on them, the best per layer into the sidecar."""
