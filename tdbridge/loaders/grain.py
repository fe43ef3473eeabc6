"""A TensorDict as a data source of Grain."""

from tdbridge.loaders.rows import Rows


class GrainSource(Rows):
    """The rows of a TensorDict for Grain: `Rows`, by the name under which one looks for it.

    Batched with `collate`, TensorDicts stay TensorDicts; Grain's own batching is a stack of numpy
    arrays. What comes from Grain's worker processes is no longer declared consolidated:
    `collate(batch)`, or `Loader(dataset, transform=collate)`, does so again, without a copy.

    What it takes and raises is what `Rows` does.

    Example:
        >>> import grain, torch
        >>> from tensordict import TensorDict
        >>> from tdbridge.loaders import collate
        >>> td = TensorDict(x=torch.arange(6), batch_size=[6])
        >>> dataset = grain.MapDataset.source(GrainSource(td)).shuffle(seed=1)
        >>> [batch["x"].tolist() for batch in dataset.batch(4, batch_fn=collate)]
        [[...], [...]]
    """
