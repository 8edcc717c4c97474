"""JSON schemas of clients: checked, brought into one form, and prepared for grammars."""
