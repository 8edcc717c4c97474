"""Streaming parsers for a model's answer: reasoning content, tool calls and plain text.

`answer_parser.AnswerParser` turns pieces of text into events. Each dialect has a file; `dialects` lists them by vLLM's
names, `marks.py` detects them from a model's chat template.
"""
