"""The fastest training step of a llama that we can write by hand, without meshpar, for each layout of eight devices.

`bench_step.py` holds meshpar's step against it. Everything is explicit: forward, backward, collectives and update.

    layers.py      one decoder layer, forward and backward
    experts.py     a mixture of experts in place of its MLP, forward and backward
    attention.py   causal attention of packed documents, forward and backward
    ends.py        the embedding, and the output projection with its loss
    axes.py        the collectives of a layout
    adamw.py       the update
    step.py        a step of every layout but the pipeline
    pipeline.py    a step in stages
    program.py     compiles a step
    convert.py     the parameters, from meshpar's
"""
