"""Training data: from files to batches.

A source (`sources`) is a set of files; their rows (`formats`, `documents`) become documents, tokens
and target masks (`tokenize`), then rows of one length (`packing`) in a random-access folder
(`dataset`, made by `prepare`). Training reads such packed datasets, mixed by weight, through Grain
(`loader`): batch i is a function of the data, the seed and i, so the whole data state is one
integer.
"""
