"""The OpenAI dialect: chat completions, completions, responses, embeddings, models.

Knows no other dialect; what its routes share (`common`) llama-server's use too.
"""
