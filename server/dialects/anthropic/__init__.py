"""The Anthropic dialect. Knows no other dialect."""
