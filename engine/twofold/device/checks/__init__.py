"""Checks of a device against the CPU, before a model is loaded: copies, handshake, graph, blocks and experts.

self_check      the checks of a model, short (before it is served) and long (`twofold doctor --gpu`), and the report
running         runs checks in order within a time limit; a check that never returns is abandoned
copies          copies in both directions, and uploads into slots
experts         two experts of each format against the CPU; a step with the handshake, eager and as a graph
blocks          one layer of each kind of blocks against the CPU
loss            whether a device is lost after an error of a step
fixed_experts   experts in slots that never change
"""
