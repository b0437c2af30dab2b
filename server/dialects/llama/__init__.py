"""llama-server's own routes, beside those it shares with OpenAI's dialect. Knows no other dialect."""
