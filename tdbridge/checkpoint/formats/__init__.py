"""One module per format, each with the same four functions.

* `is_at(directory)`: whether a checkpoint of this format lies there.
* `encode(leaf, where)`: the leaf as the engine takes it, or an error that says why it cannot.
* `write(directory, tree)`: nested dicts and lists of encoded leaves, into a new directory.
* `read(directory)`: the leaves by path; nothing that is read is executed.
"""
