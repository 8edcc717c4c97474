"""What a model's answer says besides text: its thinking and its calls of tools, read while it is written.

`answer_parser.AnswerParser` turns pieces of text into events. The dialects are one file each; `dialects.py` knows them
by vLLM's names, `marks.py` by what a model's chat template shows.
"""
