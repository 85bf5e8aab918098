"""Tokenizer libraries behind one adapter; `load` picks the adapter by the file's content."""
