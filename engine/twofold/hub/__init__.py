"""Models by their name on a Hugging Face hub: names, the files to fetch, the local cache, downloads.

Only `remote` and `download` import `huggingface_hub` (extra `hub`), and only when a download is needed.
"""
