"""Text input and output: tokenizers, chat templates, dialects of tool calls and reasoning."""
