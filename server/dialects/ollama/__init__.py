"""The Ollama dialect. Knows no other dialect."""
