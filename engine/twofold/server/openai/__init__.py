"""OpenAI's chat, completions and tokenizer routes; other APIs build on their answers."""
