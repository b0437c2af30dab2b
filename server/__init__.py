"""The REST server. It is not there yet: this package keeps its place in the wheel's layout."""
