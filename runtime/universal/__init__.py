"""Architectures without a native file, run by transformers' own code over our paged attention.

    load        a folder -> a model that may be served, or the reason why not
    obstacles   what a configuration alone says against it
    network     transformers' module: built, read from a checkpoint, called
    rotary      frequencies that depend on the batch, pinned
    attention   the function that transformers calls in place of its attention
    probe       one forward pass that notes what every layer asks of attention
    gate        what is tried before a model may serve
    verify      the longer trial against transformers' own attention, on request
    paged       made-up sequences over scattered blocks, for the two
    model       the model as the runtime sees it

transformers takes seconds to import: everything here is imported on use.
"""
