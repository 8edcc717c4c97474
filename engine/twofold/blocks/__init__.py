"""Blocks of a decoder layer, one file each; `ops` are the native operations they run on."""
