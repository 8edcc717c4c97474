"""Repairs of conversations, the same for every API and chat template.

Clients send what other servers and models gave out: damaged calls, foreign ids, pictures, roles in any order.
`content.py` and `calls.py` read them without a template; `arranging.py` gives a template what it renders.
"""
