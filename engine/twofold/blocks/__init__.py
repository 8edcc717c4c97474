"""What a decoder layer is made of, one file per block; `ops` are the native operations they run on."""
