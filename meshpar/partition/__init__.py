"""Partitions a traced program of whole arrays: any Flax model becomes a program on local shards.

layout.py         how a value is laid out, and the moves between layouts (plain Python)
signature.py      which dims of an operation correspond, and which axes shard them
nodes.py          what a plan knows of a value
plan.py           walks the traced program: the layout of every value
rules/            one rule a primitive, one file a family
program.py        the planned program, and the function that runs it on shards
moved.py          performs the moves
in_loops.py       rows that a loop over layers makes of several parameters, as LoRA's sums
loss.py           the loss of a training, partitioned
moved_values.py   what `explain --activations` lists
source.py         the line of the user's code
"""
